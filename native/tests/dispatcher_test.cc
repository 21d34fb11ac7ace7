// The rules in native code, each once. tests/unit/test_dispatcher.py and tests/contract/test_replay.py
// hold them to the specification in Python.

#include "schedule/dispatcher.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "testing/check.h"

using namespace gradlane;

namespace {

using Starts = Dispatcher::Starts;

// A message a tensor, of 4 bytes each, on one lane.
Schedule ScheduleOf(const std::vector<uint32_t>& priorities, std::optional<uint64_t> window) {
    Schedule schedule;
    schedule.tensors = static_cast<uint32_t>(priorities.size());
    for (uint32_t tensor = 0; tensor < priorities.size(); ++tensor) {
        schedule.messages.push_back({4, priorities[tensor], 0, false, {tensor}});
    }
    schedule.windows = {window};
    return schedule;
}

Starts Ready(Dispatcher& dispatcher, uint32_t tensor) {
    Starts starts;
    dispatcher.Ready(tensor, &starts);
    return starts;
}

Starts Finished(Dispatcher& dispatcher, uint32_t message) {
    Starts starts;
    dispatcher.Finished(message, &starts);
    return starts;
}

Starts Allow(Dispatcher& dispatcher, uint32_t message) {
    Starts starts;
    dispatcher.Allow(message, &starts);
    return starts;
}

}  // namespace

TEST(TheMostUrgentStartsWhenTheWindowHasRoom) {
    Dispatcher dispatcher(ScheduleOf({3, 2, 1, 0}, 8));
    for (int iteration = 0; iteration < 2; ++iteration) {
        dispatcher.Begin();
        CHECK_EQ(Ready(dispatcher, 0), Starts{0});
        CHECK_EQ(Ready(dispatcher, 1), Starts{1});
        CHECK_EQ(Ready(dispatcher, 2), Starts{});
        CHECK_EQ(Ready(dispatcher, 3), Starts{});
        CHECK_EQ(Finished(dispatcher, 0), Starts{3});
        CHECK_EQ(Finished(dispatcher, 1), Starts{2});
        CHECK(!dispatcher.done());
        CHECK_EQ(Finished(dispatcher, 3), Starts{});
        CHECK_EQ(Finished(dispatcher, 2), Starts{});
        CHECK(dispatcher.done());
    }
}

TEST(EqualPrioritiesStartInTheOrderOfEligibility) {
    Dispatcher dispatcher(ScheduleOf({5, 5, 5}, 4));
    CHECK_EQ(Ready(dispatcher, 2), Starts{2});
    CHECK_EQ(Ready(dispatcher, 1), Starts{});
    CHECK_EQ(Ready(dispatcher, 0), Starts{});
    CHECK_EQ(Finished(dispatcher, 2), Starts{1});
    CHECK_EQ(Finished(dispatcher, 1), Starts{0});
}

TEST(AMessageLargerThanTheWindowGoesAlone) {
    Schedule schedule = ScheduleOf({0, 1}, 8);
    schedule.messages[0].bytes = 100;
    Dispatcher dispatcher(schedule);
    CHECK_EQ(Ready(dispatcher, 1), Starts{1});
    CHECK_EQ(Ready(dispatcher, 0), Starts{});
    CHECK_EQ(Finished(dispatcher, 1), Starts{0});
}

TEST(AMessageWaitsForAllThatItNeeds) {
    Schedule schedule = ScheduleOf({0, 0}, std::nullopt);
    schedule.messages[0].needs = {0, 1};  // held until tensor 1 is ready
    Dispatcher dispatcher(schedule);
    CHECK_EQ(Ready(dispatcher, 0), Starts{});
    CHECK_EQ(Ready(dispatcher, 1), (Starts{0, 1}));
}

TEST(ASequenceIsTheOrderOfStarts) {
    Schedule schedule = ScheduleOf({0, 1, 2}, std::nullopt);
    schedule.sequence = {2, 0, 1};
    Dispatcher dispatcher(schedule);
    CHECK_EQ(Ready(dispatcher, 0), Starts{});
    CHECK_EQ(Ready(dispatcher, 2), (Starts{2, 0}));
    CHECK_EQ(Ready(dispatcher, 1), Starts{1});
}

TEST(AFollowerStartsWhatIsAllowed) {
    Schedule schedule = ScheduleOf({0, 1}, std::nullopt);
    schedule.sequence = {0, 1};
    schedule.follow = true;
    Dispatcher dispatcher(schedule);
    CHECK_EQ(Ready(dispatcher, 0), Starts{});
    CHECK_EQ(Allow(dispatcher, 1), Starts{});
    CHECK_EQ(Allow(dispatcher, 0), Starts{});
    CHECK_EQ(Ready(dispatcher, 1), (Starts{1, 0}));
}

TEST(SecondPhasesStartWhenAllMessagesAreReduced) {
    Schedule schedule = ScheduleOf({2, 1, 0}, 4);
    schedule.messages[1].two_phase = schedule.messages[2].two_phase = true;
    schedule.second_phases = {2, 1};
    Dispatcher dispatcher(schedule);
    CHECK_EQ(Ready(dispatcher, 0), Starts{0});
    CHECK_EQ(Ready(dispatcher, 1), Starts{});
    CHECK_EQ(Ready(dispatcher, 2), Starts{});
    CHECK_EQ(Finished(dispatcher, 0), Starts{2});
    CHECK_EQ(Finished(dispatcher, 2), Starts{1});
    CHECK(!dispatcher.IsInSecondPhase(1));
    CHECK_EQ(Finished(dispatcher, 1), Starts{2});
    CHECK(dispatcher.IsInSecondPhase(2));
    CHECK_EQ(Finished(dispatcher, 2), Starts{1});
    CHECK_EQ(Finished(dispatcher, 1), Starts{});
    CHECK(dispatcher.done());
}

TEST(LanesAreStartedInOrderAndHaveWindowsOfTheirOwn) {
    Schedule schedule = ScheduleOf({0, 0, 0}, 4);
    schedule.windows = {4, 4};
    schedule.messages[0].lane = 1;
    schedule.messages[0].needs = schedule.messages[1].needs = {0};
    Dispatcher dispatcher(schedule);
    CHECK_EQ(Ready(dispatcher, 0), (Starts{1, 0}));
    CHECK_EQ(Ready(dispatcher, 2), Starts{});
    CHECK_EQ(Finished(dispatcher, 0), Starts{});
    CHECK_EQ(Finished(dispatcher, 1), Starts{2});
}

TEST(AScheduleWithAnIndexOutOfRangeIsNotValid) {
    CHECK(ScheduleOf({0, 1}, 4).IsValid());
    Schedule schedule = ScheduleOf({0, 1}, 4);
    schedule.messages[1].needs = {2};
    CHECK(!schedule.IsValid());
    schedule = ScheduleOf({0, 1}, 4);
    schedule.messages[1].lane = 1;
    CHECK(!schedule.IsValid());
    schedule = ScheduleOf({0, 1}, 4);
    schedule.sequence = {0, 2};
    CHECK(!schedule.IsValid());
}

int main(int argc, char** argv) { return gradlane::testing::RunTests(argc, argv); }
