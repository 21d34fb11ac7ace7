// Three ranks of a host, each with its own mapping of one segment, hand over tensors, send messages and go on a little
// at a time, in an order that an input says. Rank 0 or rank 2 may lie: it writes into the segment what the input says,
// as a member can whose code is not ours.
//
// Whatever it writes, no other rank uses memory that is not its own, or goes on for ever. Without lies all that was
// handed over, and every message that was received, ends with the right bytes.

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "fuzz/fuzz.h"
#include "host/meeting.h"
#include "node/mailboxes.h"
#include "node/messages.h"
#include "node/shared_sums.h"

namespace gradlane {

// The numbers in the segment that all ranks read: rank 0's decisions, each rank's board, and the marks of all rings.
class SharedSeam {
  public:
    static std::vector<uint64_t*> Numbers(const SharedSums& sums, uint8_t* mailboxes, uint32_t ranks) {
        std::vector<uint64_t*> numbers;
        const auto add = [&numbers](void* at, size_t words) {
            for (size_t i = 0; i < words; ++i) numbers.push_back(static_cast<uint64_t*>(at) + i);
        };
        add(&sums.decisions_->decided, 2 + 8);
        add(&sums.decisions_->heard, ranks);
        for (SharedSums::Board* board : sums.boards_) {
            add(&board->in, 4);
            add(&board->asleep, 1);
            add(&board->tellings, 8);
            add(&board->early, 4);
        }
        auto* words = reinterpret_cast<Bell::Word*>(mailboxes);
        auto* marks = reinterpret_cast<RingMarks*>(words + ranks);
        for (uint32_t rank = 0; rank < ranks; ++rank) add(words + rank, 1);
        for (uint32_t ring = 0; ring < ranks * (ranks - 1); ++ring) {
            add(&marks[ring].written, 2);
            add(&marks[ring].read, 1);
            add(&marks[ring].awaits_room, 1);
        }
        return numbers;
    }
};

}  // namespace gradlane

using namespace gradlane;

namespace {

constexpr uint32_t kRanks = 3, kMost = 24;  // tensors, and messages from one rank to another
constexpr uint32_t kPacket = 256;
constexpr uint64_t kCredit = 4 << 10;  // holds as many packets as a node's does
constexpr uint64_t kSizes[] = {0, 4, 64, 200, 1000};           // of messages
constexpr uint64_t kTensorSizes[] = {0, 4, 64, 1000, 17'000};  // the last is no small one

// Made once, since mapping memory takes longer than a run. Between the mappings are gaps, so that no rank leaves its own
// and is in another's.
class Host {
  public:
    Host() {
        std::string why;
        Gap();
        for (uint32_t rank = 0; rank < kRanks; ++rank) {
            HostRoom room;
            room.rank = rank;
            room.ranks = kRanks;
            room.numbers = {0, 1, 2};
            room.segment = rank == 0 ? Segment::Create(bytes_, &why) : Segment::Map(Fd(dup(rooms[0]->segment.fd().get())), bytes_, &why);
            MUST(static_cast<bool>(room.segment));
            for (uint32_t other = 0; other < kRanks; ++other) {
                room.wakes.emplace_back(rank == 0 ? eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) : dup(rooms[0]->wakes[other].get()));
            }
            rooms.push_back(std::make_shared<const HostRoom>(std::move(room)));
            Gap();
        }
    }
    // As a fresh segment is.
    void Clear() {
        MUST(madvise(rooms[0]->segment.data(), bytes_, MADV_REMOVE) == 0);
        uint64_t count;
        for (const Fd& wake : rooms[0]->wakes) (void)!read(wake.get(), &count, sizeof count);
    }
    size_t mail() const { return SharedSums::BytesFor(kRanks); }

    std::vector<std::shared_ptr<const HostRoom>> rooms;

  private:
    void Gap() { MUST(mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED); }

    const size_t bytes_ = SharedSums::BytesFor(kRanks) + Mailboxes::BytesFor(kRanks);
};

struct Message {
    std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
    std::vector<uint8_t> bytes;
};

// As a node uses both.
class Rank final : private Mailboxes::Owner, private Messages::Post {
  public:
    Rank(const Host& host, uint32_t self)
        : sums(host.rooms[self]), messages(kRanks, kPacket, this, kCredit), mail(host.rooms[self], host.mail(), this), said(kRanks), heard(kRanks), self_(self) {}

    // Returns whether it is to go on at once.
    bool GoOn(uint64_t bytes) {
        if (failed) return false;
        const bool more = mail.Pump(bytes);
        if (failed) return false;
        const bool still_more = sums.Progress(bytes, &ended);
        failed |= sums.fault().has_value();
        return !failed && (more || still_more);
    }
    // Whether what others have done lets it go on.
    bool CanGoOn() const { return !failed && (mail.IsReady() || sums.CanProgress()); }

    SharedSums sums;
    Messages messages;
    Mailboxes mail;
    std::vector<SharedSums::End> ended;
    std::deque<std::vector<float>> from, into;      // by tensor
    std::vector<uint8_t> ready;                     // by tensor: whether Ready was called
    std::vector<std::deque<Message>> said, heard;   // to whom, and from whom
    bool failed = false;

  private:
    Connection::Sink OnMailHeader(uint32_t rank, const Header& header) override {
        switch (header.type) {
            case FrameType::kMessage:
            case FrameType::kPart: return messages.OnHeader(rank, header);
            case FrameType::kAccept:
            case FrameType::kTaken: return Connection::Sink::Take(nullptr);
            default: return Connection::Sink::Fault(Code::kProtocol, "a frame that is not of a message");
        }
    }
    const char* OnMailFrame(uint32_t rank, const Header& header) override {
        switch (header.type) {
            case FrameType::kAccept: return messages.OnAccept(rank, header.tensor);
            case FrameType::kTaken: return messages.OnTaken(rank, header.tensor);
            default: messages.OnFrame(rank, header); return nullptr;
        }
    }
    void OnMailSent(uint32_t rank, const Header& header) override { messages.OnSent(rank, header); }
    void OnMailFault(uint32_t, Code, const char*) override { failed = true; }
    void PostRun(uint32_t rank, uint32_t priority, Run run) override { mail.Queue(rank, priority, std::move(run)); }
    void PostAnswer(uint32_t rank, FrameType type, uint32_t number) override {
        mail.QueueControl(rank, ControlFrame(type, static_cast<uint16_t>(self_), number, nullptr, 0));
    }
    void Ended(Transfer& transfer, int32_t rank) override {
        MUST(!transfer.over);
        transfer.over = true;
        transfer.rank = rank;
    }
    void Mismatch(uint32_t, const std::string&) override { failed = true; }

    const uint32_t self_;
};

// What all ranks mean by a tensor: once through the segment, or twice with something awaited in between.
struct Tensor {
    Spec spec;
    std::vector<Pass> passes;
    bool awaits = false;  // the last pass
    float sum = 0;
};

Tensor TensorOf(fuzz::Input& input) {
    const uint8_t how = input.Byte(), who = input.Byte();
    const auto root = static_cast<int32_t>(who % kRanks);
    Tensor tensor;
    tensor.spec.bytes = kTensorSizes[how % 5];
    tensor.spec.once = true;
    tensor.spec.urgent_first = (how & 64) != 0;
    tensor.spec.priority = who / 16;
    tensor.sum = 7;
    switch (how / 8 % 5) {
        case 0: tensor.passes = {{kAll, kAll, kDealt}}; break;
        case 1: tensor.passes = {{kAll, kAll, root}}; break;
        case 2: tensor.passes = {{kAll, root, root}}; break;
        case 3:
            tensor.passes = {{root, kAll, kDealt}};
            tensor.sum = static_cast<float>(1 << root);
            break;
        default: tensor.passes = {{kAll, kOwn, kDealt}, {kOwn, kAll, kDealt}};
    }
    tensor.awaits = (how & 128) != 0 || tensor.passes.size() == 2;
    return tensor;
}

class World {
  public:
    explicit World(Host& host) : host_(host) {
        host_.Clear();
        for (uint32_t self = 0; self < kRanks; ++self) ranks.push_back(std::make_unique<Rank>(host_, self));
        numbers_ = SharedSeam::Numbers(ranks[0]->sums, host_.rooms[0]->segment.data() + host_.mail(), kRanks);
    }

    void HandOver(uint32_t self) {
        Rank& rank = *ranks[self];
        const auto number = static_cast<uint32_t>(rank.from.size());
        if (number == tensors.size() || rank.failed) return;
        const Tensor& tensor = tensors[number];
        const size_t n = tensor.spec.bytes / sizeof(float);
        auto& from = rank.from.emplace_back(n, static_cast<float>(1 << self));
        auto& into = rank.into.emplace_back(n);
        rank.ready.push_back(0);
        std::vector<SharedSums::Way> ways;
        for (size_t way = 0; way < tensor.passes.size(); ++way) {
            const auto* gives = reinterpret_cast<const uint8_t*>(way == 0 ? from.data() : into.data());
            ways.push_back({tensor.passes[way], gives, reinterpret_cast<uint8_t*>(into.data()), tensor.awaits && way + 1 == tensor.passes.size()});
        }
        rank.sums.Start(number, tensor.spec, std::move(ways));
    }
    // Of the tensors whose last pass awaits something, the first or the last.
    bool MakeReady(uint32_t self, bool last) {
        Rank& rank = *ranks[self];
        std::vector<uint32_t> could;
        for (uint32_t number = 0; number < rank.ready.size(); ++number) {
            const Tensor& tensor = tensors[number];
            const bool gone_once = tensor.passes.size() == 1 || tensor.spec.bytes == 0 || std::count(rank.ended.begin(), rank.ended.end(), SharedSums::End{number, 1}) != 0;
            if (tensor.awaits && tensor.spec.bytes != 0 && rank.ready[number] == 0 && gone_once) could.push_back(number);
        }
        if (could.empty() || rank.failed) return false;
        const uint32_t number = last ? could.back() : could.front();
        rank.ready[number] = 1;
        rank.sums.Ready(number);
        return true;
    }
    void Send(uint32_t self, uint32_t to, uint64_t bytes, uint32_t priority) {
        Rank& rank = *ranks[self];
        if (rank.said[to].size() == kMost || rank.failed) return;
        Message& message = rank.said[to].emplace_back();
        message.bytes.assign(bytes, static_cast<uint8_t>(rank.said[to].size()));
        rank.messages.Send(message.transfer, to, 0, priority, message.bytes.data(), bytes);
        rank.mail.Write(kCredit);
    }
    void Receive(uint32_t self, uint32_t from, uint64_t bytes) {
        Rank& rank = *ranks[self];
        if (rank.heard[from].size() == kMost || rank.failed) return;
        Message& message = rank.heard[from].emplace_back();
        message.bytes.assign(bytes, 0);
        rank.messages.Receive(message.transfer, static_cast<int32_t>(from), 0, message.bytes.data(), bytes);
    }
    void Lie(fuzz::Input& input, Rank& liar) {
        const uint8_t how = input.Byte();
        switch (how % 4) {
            case 0:
            case 1: {  // a number, near to what it is or far from it
                auto* number = reinterpret_cast<std::atomic<uint64_t>*>(numbers_[input.Byte() % numbers_.size()]);
                const uint8_t value = input.Byte();
                *number = (how & 4) != 0 ? input.Word() : *number + static_cast<uint64_t>(static_cast<int8_t>(value));
                break;
            }
            case 2: {  // a frame
                Header header;
                header.type = static_cast<FrameType>(1 + input.Byte() % 20);
                header.tensor = input.Byte() % 8;
                header.iteration = input.Byte() % 2;
                header.offset = (how & 4) != 0 ? input.Word() : kSizes[input.Byte() % 5];
                header.length = ControlBytes(header.type).value_or((how & 8) != 0 ? static_cast<uint32_t>(header.offset % (4 * kPacket)) : 0);
                std::vector<uint8_t> frame(kHeaderBytes + header.length, how);
                Encode(header, frame.data());
                if ((how & 16) != 0) frame.resize(input.Byte() % frame.size());
                liar.mail.QueueControl(how / 32 % 2 == 0 ? 1 : (&liar == ranks[0].get() ? 2 : 0), frame);
                liar.mail.Write(kCredit);
                break;
            }
            default: {  // anything, where ranks write
                uint8_t* at = host_.rooms[0]->segment.data() + input.Word() % (host_.mail() + Mailboxes::BytesFor(kRanks));
                *at = input.Byte();
            }
        }
    }
    // What can go on goes on.
    void Finish(uint32_t rounds, const Rank* liar) {
        for (uint32_t round = 0; round < rounds; ++round) {
            bool more = false;
            for (uint32_t self = 0; self < kRanks; ++self) {
                if (ranks[self].get() == liar) continue;
                more |= ranks[self]->GoOn(1 << 20);
                while (MakeReady(self, false)) more = true;
            }
            for (const auto& rank : ranks) more |= rank.get() != liar && rank->CanGoOn();
            if (!more) return;
        }
        MUST(liar != nullptr);
    }
    void CheckAll() {
        size_t begun = tensors.size();
        for (const auto& rank : ranks) begun = std::min(begun, rank->from.size());
        for (uint32_t self = 0; self < kRanks; ++self) {
            Rank& rank = *ranks[self];
            MUST(!rank.failed);
            for (uint32_t number = 0; number < begun; ++number) {
                const Tensor& tensor = tensors[number];
                if (tensor.spec.bytes == 0) continue;
                MUST(std::count(rank.ended.begin(), rank.ended.end(), SharedSums::End{number, 0}) == 1);
                const Pass& last = tensor.passes.back();
                if (last.to >= 0 && last.to != static_cast<int32_t>(self)) continue;
                if (last.from == static_cast<int32_t>(self)) continue;  // it has what it gives
                for (const float value : rank.into[number]) MUST(value == tensor.sum);
            }
            for (uint32_t from = 0; from < kRanks; ++from) {
                const auto& said = ranks[from]->said[self];
                for (size_t i = 0; i < rank.heard[from].size() && i < said.size(); ++i) {
                    MUST(rank.heard[from][i].transfer->over && said[i].transfer->over);
                    MUST(rank.heard[from][i].bytes == said[i].bytes);
                }
            }
        }
    }

    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<Tensor> tensors;

  private:
    Host& host_;
    std::vector<uint64_t*> numbers_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static Host host;
    fuzz::Input input(data, size);
    const uint8_t how = input.Byte();
    World world(host);
    const uint64_t bytes = kSizes[how / 4 % 5];  // of all messages: receives are of no other size
    Rank* liar = (how & 1) == 0 ? nullptr : world.ranks[how & 2].get();
    for (int steps = 0; !input.empty() && steps < 300; ++steps) {
        const uint8_t deed = input.Byte();
        const uint32_t self = deed / 8 % kRanks, other = (self + 1 + deed / 64 % 2) % kRanks;
        switch (deed % 8) {
            case 0:
                if (world.tensors.size() < kMost) world.tensors.push_back(TensorOf(input));
                break;
            case 1: world.HandOver(self); break;
            case 2: world.MakeReady(self, deed / 64 % 2 != 0); break;
            case 3: world.Send(self, other, bytes, deed / 128); break;
            case 4: world.Receive(self, other, bytes); break;
            case 5:
                if (liar != nullptr) world.Lie(input, *liar);
                break;
            default: world.ranks[self]->GoOn(1 + input.Byte() * uint64_t{8}); break;
        }
    }
    world.Finish(liar == nullptr ? 10000 : 20, liar);
    if (liar == nullptr) world.CheckAll();
    return 0;
}
