// Proven members of a job, and a model of what each may say next. An input is a list of steps. Most steps are what the
// model allows, so that a run gets far; some are not. The steps drive a server's Aggregator by itself, or a whole node
// in a process without a worker.
//
// What is checked: a step is refused exactly if the model refuses it, the failure names the member that the model
// blames, and each sum is the sum of one part of every contributor.

#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "fuzz/seam.h"
#include "node/aggregator.h"
#include "node/greeting.h"

using namespace gradlane;

namespace {

constexpr uint32_t kPlaces = 6;  // packets of a tensor at most

// One step, as the input has it. The mutator below works on whole steps.
struct Step {
    uint8_t what, member, tensor, place, odd, a, b, c;
};
constexpr size_t kStepBytes = sizeof(Step);
constexpr uint8_t kOdd = 224;  // Step::odd from here on: not what the model would have chosen

// Whom a refused step is the fault of.
using Verdict = std::optional<uint32_t>;

// What every process of the job knows after the steps so far (native/wire/wire.md).
class Model {
  public:
    struct Tensor {
        Definition define;
        std::vector<Piece> pieces;
        std::vector<uint32_t> pushed;  // by member and place: iterations
        bool Contributes(uint32_t member) const { return define.from == kAll || define.from == static_cast<int32_t>(member); }
        uint32_t& Pushed(uint32_t member, size_t place) { return pushed[member * pieces.size() + place]; }
        // The iteration that the sum of one packet is at, and the least of all packets.
        uint32_t At(size_t place) {
            uint32_t least = UINT32_MAX;
            for (uint32_t member = 0; member < kWorld; ++member) {
                if (Contributes(member)) least = std::min(least, Pushed(member, place));
            }
            return least;
        }
        uint32_t Done() {
            uint32_t least = UINT32_MAX;
            for (size_t place = 0; place < pieces.size(); ++place) least = std::min(least, At(place));
            return least;
        }
        bool IsWaiting() {
            for (size_t place = 0; place < pieces.size(); ++place) {
                if (define.whole != 0 && At(place) != Done()) return true;
                for (uint32_t member = 0; member < kWorld; ++member) {
                    if (Contributes(member) && Pushed(member, place) != At(place)) return true;
                }
            }
            return false;
        }
    };

    explicit Model(bool one_sided) : one_sided_(one_sided) {}

    Verdict Define(uint32_t member, uint32_t id, const Definition& define) {
        const auto told = tensors.find(id);
        if (told != tensors.end()) return told->second.define == define ? Verdict() : member;
        if (id < next) return {};  // over already
        const Spec spec = AsSpec(define);
        const bool can_be = id == next && IsValidDType(define.dtype) && IsValidOp(define.op) && define.from >= kAll && define.to >= kAll &&
                            define.at >= kDealt && define.at < 1 && define.from < static_cast<int32_t>(kWorld) &&
                            define.to < static_cast<int32_t>(kWorld) && define.lane < kLanes && spec.bytes % ElementBytes(spec.dtype) == 0 &&
                            (one_sided_ || (define.from == kAll && define.to == kAll));
        if (!can_be) return member;
        Tensor tensor{define, Dealer(1).Cut(spec.bytes, kPacket)->by_server[0], {}};
        tensor.pushed.resize(kWorld * tensor.pieces.size());
        tensors.emplace(next++, std::move(tensor));
        return {};
    }
    Verdict Push(uint32_t member, const Header& header, uint16_t lane) {
        const auto found = tensors.find(header.tensor);
        if (found == tensors.end()) return ended_by.at(header.tensor);
        Tensor& tensor = found->second;
        const size_t place = header.offset / kPacket;
        const bool is_one = header.offset % kPacket == 0 && place < tensor.pieces.size() && tensor.pieces[place].length == header.length;
        if (!is_one || lane != tensor.define.lane || !tensor.Contributes(member)) return member;
        const uint32_t at = tensor.At(place);
        if (header.iteration != at || tensor.Pushed(member, place) != at) return member;
        if (tensor.define.whole != 0 && at != tensor.Done()) return member;
        ++tensor.Pushed(member, place);
        return {};
    }
    Verdict Forget(uint32_t member, uint32_t below) {
        if (below > next) return member;
        for (auto each = tensors.begin(); each != tensors.end() && each->first < below; ++each) {
            if (each->second.IsWaiting()) return member;
        }
        for (auto each = tensors.begin(); each != tensors.end() && each->first < below; each = tensors.erase(each)) {
            ended_by[each->first] = member;
        }
        return {};
    }

    std::map<uint32_t, Tensor> tensors;
    std::map<uint32_t, uint32_t> ended_by;
    uint32_t next = 0;

  private:
    const bool one_sided_;  // whether a tensor of one sender or receiver may be used again and again
};

float PartOf(uint32_t member) { return static_cast<float>(1 << member); }

// Whoever carries out the steps. Each returns whom it blames, if it refuses.
class Subject {
  public:
    virtual ~Subject() = default;
    virtual Verdict Define(uint32_t member, uint32_t id, const Definition& define) = 0;
    virtual Verdict Push(uint32_t member, const Header& header, uint16_t lane, const std::vector<uint8_t>& payload) = 0;
    virtual Verdict Forget(uint32_t member, uint32_t below) = 0;
};

class BareAggregator : public Subject, private Outbox {
  public:
    explicit BareAggregator(Order order) : sums_(0, kWorld, -1, order, kPacket, this) {}

    Verdict Define(uint32_t member, uint32_t id, const Definition& define) override {
        if (const auto told = told_.find(id); told != told_.end()) return told->second == define ? Verdict() : member;
        if (id != told_.size() || !IsValidDType(define.dtype) || !IsValidOp(define.op) || define.lane >= kLanes) return member;
        const Spec spec = AsSpec(define);
        const auto is_rank = [](int32_t rank) { return rank >= kAll && rank < static_cast<int32_t>(kWorld); };
        if (!is_rank(spec.from) || !is_rank(spec.to) || spec.at < kDealt || spec.at > 0 || spec.bytes % ElementBytes(spec.dtype) != 0) return member;
        told_.emplace(id, define);
        sums_.Define(id, spec, Dealer(1).Cut(spec.bytes, kPacket));
        return {};
    }
    Verdict Push(uint32_t member, const Header& header, uint16_t lane, const std::vector<uint8_t>& payload) override {
        if (!sums_.Has(header.tensor)) return ended_by_.at(header.tensor);
        const char* why = "";
        const int64_t place = sums_.Admit(header, member, &why);
        if (place < 0 || lane != sums_.LaneOf(header.tensor)) return member;
        BufferRef buffer = sums_.Take();
        std::memcpy(buffer.data(), payload.data(), payload.size());
        sums_.Arrive(header.tensor, static_cast<uint32_t>(place), member, std::move(buffer));
        MUST(sums_.held_bytes() <= kTensors * (kWorld + 1) * kPlaces * kPacket * 2);
        return {};
    }
    Verdict Forget(uint32_t member, uint32_t below) override {
        if (below > told_.size()) return member;
        for (uint32_t id = 0; id < below; ++id) {
            if (sums_.Has(id) && sums_.IsWaiting(id)) return member;
        }
        for (uint32_t id = 0; id < below; ++id) {
            if (!sums_.Has(id)) continue;
            sums_.Forget(id);
            ended_by_[id] = member;
        }
        return {};
    }

  private:
    void Return(uint32_t, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place, uint32_t, BufferRef sum) override {
        MUST(static_cast<bool>(sum));
        if (spec.dtype != DType::kF32 || spec.op != Op::kSum) return;
        float expected = 0;
        for (uint32_t member = 0; member < kWorld; ++member) {
            if (spec.from == kAll || spec.from == static_cast<int32_t>(member)) expected += PartOf(member);
        }
        for (size_t at = 0; at < layout->by_server[0][place].length; at += sizeof(float)) {
            float value;
            std::memcpy(&value, sum.data() + at, sizeof value);
            MUST(value == expected);
        }
    }
    void ReturnTo(uint32_t, uint32_t, const Spec&, const std::shared_ptr<const Layout>&, uint32_t, uint32_t, BufferRef) override {}
    void Delivered(uint32_t, uint32_t) override {}
    void Consumed(uint32_t, uint32_t) override {}
    void Over(uint32_t) override {}
    void Disagree(uint32_t, const std::string&) override {}

    std::map<uint32_t, Definition> told_;
    std::map<uint32_t, uint32_t> ended_by_;
    Aggregator sums_;
};

class WholeNode : public Subject {
  public:
    explicit WholeNode(Order order) : seam_(Options(order)) {}

    Verdict Define(uint32_t member, uint32_t id, const Definition& define) override {
        uint8_t payload[Definition::kBytes];
        EncodeDefinition(define, payload);
        return Say(member, 0, ControlFrame(FrameType::kDefine, static_cast<uint16_t>(member), id, payload, sizeof payload));
    }
    Verdict Push(uint32_t member, const Header& header, uint16_t lane, const std::vector<uint8_t>& payload) override {
        std::vector<uint8_t> frame(kHeaderBytes);
        Encode(header, frame.data());
        frame.insert(frame.end(), payload.begin(), payload.end());
        return Say(member, lane, frame);
    }
    Verdict Forget(uint32_t member, uint32_t below) override {
        return Say(member, 0, ControlFrame(FrameType::kForget, static_cast<uint16_t>(member), below, nullptr, 0));
    }

  private:
    static NodeOptions Options(Order order) {
        NodeOptions options;
        options.server = 0;
        options.tell_tables = true;
        options.membership.world = kWorld;
        options.membership.servers = 1;
        options.membership.lanes = kLanes;
        options.marks.resize(kLanes);
        options.membership.secret = {1};
        options.packet_bytes = kPacket;
        options.order = order;
        return options;
    }
    Verdict Say(uint32_t member, uint16_t lane, const std::vector<uint8_t>& frame) {
        NodeSeam::Peer& peer = seam_.peers[1 + lane * kWorld + member];
        seam_.Say(peer, frame);
        for (NodeSeam::Peer& each : seam_.peers) seam_.Read(each);
        const Failure failure = seam_.node->failure();
        if (failure.code == Code::kNone) return {};
        MUST(failure.rank >= 0 && failure.server == -1);
        MUST(!failure.text.empty());
        return static_cast<uint32_t>(failure.rank);
    }

    NodeSeam seam_;
};

// A definition of the step: whole numbers of elements, and mostly of all members for all.
Definition DefinitionOf(const Step& step, bool one_sided) {
    Definition define;
    define.dtype = step.a % 4 == 0 ? step.b % 8 : 0;
    define.op = step.a % 4 == 0 ? step.c % 4 : 0;
    define.bytes = (1 + step.place % kPlaces) * uint64_t{kPacket} - (step.c % 8) * uint64_t{8};
    define.whole = step.b / 8 % 2;
    define.urgent_sums = step.c / 64 % 2;
    define.priority = step.c / 64;
    define.lane = step.b / 16 % kLanes;
    if (one_sided && step.b / 32 % 2 != 0) (step.b / 64 % 2 != 0 ? define.from : define.to) = static_cast<int32_t>(step.c / 8 % kWorld);
    if (step.odd < kOdd) return define;
    switch (step.odd % 8) {
        case 0: define.bytes += 1 + step.c % 3; break;
        case 1: define.dtype = 8 + step.c % 8; break;
        case 2: define.op = 4 + step.c % 8; break;
        case 3: define.lane = kLanes + step.c % 4; break;
        case 4: define.from = static_cast<int8_t>(step.c); break;
        case 5: define.to = static_cast<int8_t>(step.c); break;
        case 6: define.at = static_cast<int8_t>(step.c); break;
        default: break;  // an odd id
    }
    return define;
}

// A packet that the model allows, as near as there is one to what the step asks for.
std::optional<std::pair<uint32_t, size_t>> Allowed(Model::Tensor& tensor, uint32_t member, size_t place) {
    const size_t places = tensor.pieces.size();
    for (size_t turn = 0; turn < places * kWorld; ++turn) {
        const uint32_t who = (member + static_cast<uint32_t>(turn / places)) % kWorld;
        const size_t where = (place + turn) % places;
        const uint32_t at = tensor.At(where);
        if (tensor.Contributes(who) && tensor.Pushed(who, where) == at && (tensor.define.whole == 0 || at == tensor.Done())) return std::pair(who, where);
    }
    return std::nullopt;
}

// Does one step, and checks what came of it. Returns whether the run goes on.
bool Do(const Step& step, Model& model, Subject& subject, bool one_sided) {
    uint32_t member = step.member % kWorld;
    const auto agree = [](const Verdict& got, const Verdict& expected) {
        MUST(got == expected);
        return !expected;
    };
    if (step.what % 8 == 0 || model.tensors.empty()) {
        if (model.next >= kTensors) return true;
        const bool again = step.tensor % 2 != 0 && !model.tensors.empty();  // another member's word on what is known
        const uint32_t id = again ? model.tensors.rbegin()->first : model.next + (step.odd >= kOdd && step.odd % 8 == 7 ? 1 + step.c % 3 : 0);
        const Definition define = again && step.odd < kOdd ? model.tensors.rbegin()->second.define : DefinitionOf(step, one_sided);
        return agree(subject.Define(member, id, define), model.Define(member, id, define));
    }
    if (step.what % 8 == 1 && step.c % 4 == 0) {
        const uint32_t below = step.odd < kOdd ? step.tensor % (model.next + 1) : step.tensor % (kTensors + 4);
        return agree(subject.Forget(member, below), model.Forget(member, below));
    }
    auto chosen = model.tensors.begin();
    std::advance(chosen, step.tensor % model.tensors.size());
    uint32_t id = chosen->first;
    const auto push = [&](uint32_t who, size_t place, uint32_t iteration, uint16_t lane, uint64_t aside, uint32_t longer) {
        Model::Tensor& tensor = chosen->second;
        const Piece& piece = tensor.pieces[place];
        Header header;
        header.type = FrameType::kPush;
        header.tensor = id;
        header.offset = piece.offset + aside;
        header.length = std::min(piece.length + longer, kPacket);
        header.iteration = iteration;
        std::vector<uint8_t> payload(header.length);
        const float part = PartOf(who);
        for (size_t at = 0; at + sizeof part <= payload.size(); at += sizeof part) std::memcpy(payload.data() + at, &part, sizeof part);
        return agree(subject.Push(who, header, lane, payload), model.Push(who, header, lane));
    };
    Model::Tensor& tensor = chosen->second;
    size_t place = step.place % tensor.pieces.size();
    if (step.odd < kOdd) {
        // one packet, or many
        for (size_t times = step.what % 8 < 6 ? 1 : 1 + step.a % (2 * kPlaces); times > 0; --times) {
            const auto allowed = Allowed(tensor, member, place);
            if (!allowed) return true;
            std::tie(member, place) = *allowed;
            if (!push(member, place, tensor.Pushed(member, place), tensor.define.lane, 0, 0)) return false;
        }
        return true;
    }
    const uint32_t next = tensor.Pushed(member, place);
    switch (step.odd % 8) {
        case 0:
        case 1: return push(member, place, next, tensor.define.lane, 0, 0);  // allowed, or too early, or not this member's
        case 2: return push(member, place, next + 1 + step.a % 2, tensor.define.lane, 0, 0);
        case 3: return push(member, place, next - 1, tensor.define.lane, 0, 0);
        case 4: return push(member, place, next, step.a % kLanes, 0, 0);
        case 5: return push(member, place, next, tensor.define.lane, 1 + step.a, 0);
        case 6: return push(member, place, next, tensor.define.lane, 0, 1 + step.a % 8);
        default:  // what is over
            if (model.ended_by.empty()) return true;
            id = model.ended_by.begin()->first;
            return push(member, place, step.a % 2, tensor.define.lane, 0, 0);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const bool bare = data[0] % 16 != 0;  // a whole node takes as long as many of these
    const Order order = data[0] / 16 % 2 != 0 ? Order::kRank : Order::kArrival;
    std::unique_ptr<Subject> subject;
    if (bare) {
        subject = std::make_unique<BareAggregator>(order);
    } else {
        subject = std::make_unique<WholeNode>(order);
    }
    Model model(bare);
    for (size_t at = 1; at + kStepBytes <= size; at += kStepBytes) {
        Step step;
        std::memcpy(&step, data + at, kStepBytes);
        if (!Do(step, model, *subject, bare)) break;
    }
    return 0;
}

// Whole steps come, go, change places and are done again; a change of one is of one of its parts.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
    std::minstd_rand random(seed);  // seeded for each mutation, which mt19937 takes long for
    std::vector<Step> steps(size <= 1 ? 0 : (size - 1) / kStepBytes);
    if (!steps.empty()) std::memcpy(steps.data(), data + 1, steps.size() * kStepBytes);
    const uint8_t how = size == 0 || random() % 4 == 0 ? static_cast<uint8_t>(random() >> 8) : data[0];
    const auto any = [&random](size_t below) { return static_cast<size_t>(random() % below); };
    const auto place = [&](size_t at) { return steps.begin() + static_cast<ptrdiff_t>(at); };
    for (size_t times = 1 + any(4); times > 0; --times) {
        switch (steps.empty() ? 0 : any(6)) {
            case 0:
            case 1: {
                Step fresh;
                for (uint8_t* byte : {&fresh.what, &fresh.member, &fresh.tensor, &fresh.place, &fresh.odd, &fresh.a, &fresh.b, &fresh.c}) {
                    *byte = static_cast<uint8_t>(random() >> 8);
                }
                steps.insert(place(any(steps.size() + 1)), fresh);
                break;
            }
            case 2: reinterpret_cast<uint8_t*>(&steps[any(steps.size())])[any(kStepBytes)] = static_cast<uint8_t>(random() >> 8); break;
            case 3: steps.erase(place(any(steps.size()))); break;
            case 4: std::swap(steps[any(steps.size())], steps[any(steps.size())]); break;
            default: {
                const Step again = steps[any(steps.size())];
                steps.insert(place(any(steps.size() + 1)), again);
            }
        }
    }
    if (max_size == 0) return 0;
    steps.resize(std::min(steps.size(), (max_size - 1) / kStepBytes));
    data[0] = how;
    if (!steps.empty()) std::memcpy(data + 1, steps.data(), steps.size() * kStepBytes);
    return 1 + steps.size() * kStepBytes;
}
