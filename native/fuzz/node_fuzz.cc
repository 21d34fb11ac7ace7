// A node whose peers send anything: workers that it has let in, servers that it dialled, and one
// stranger. The node runs without its thread and without a clock; its sockets are pairs in this
// process. An input is a list of actions: a peer sends a frame whole, cut in two or raw, hangs up,
// or begins to read; or the node's owner calls a method.
//
// Whatever they do, the node uses no memory but its own, what it holds stays bounded, and the
// stranger alone makes nothing fail.

#include <cstring>

#include "digest/crc32c.h"
#include "fuzz/seam.h"

using namespace gradlane;

namespace {

Rule SomeRule(fuzz::Input& input) {
    Rule rule;
    const uint8_t how = input.Byte();
    rule.kind = static_cast<RuleKind>(1 + how % 4);
    rule.nesterov = rule.kind == RuleKind::kMomentum && (how & 4) != 0;
    rule.maximize = (how & 8) != 0;
    rule.lr = input.Byte() / 64.0;
    rule.weight_decay = (how & 16) != 0 ? 0.5 : 0;
    rule.momentum = rule.kind == RuleKind::kMomentum ? 0.5 : 0;
    rule.beta1 = rule.beta2 = 0.5;
    return rule;
}

std::vector<uint8_t> Frame(fuzz::Input& input) {
    Header header;
    const uint8_t kind = input.Byte();  // the last type has one value of its own, so that those of the corpus stay what they are
    header.type = kind == 255 ? FrameType::kReceived : static_cast<FrameType>(1 + kind % 17);
    header.tensor = input.Byte() % (kTensors + 2);
    header.offset = input.Byte() % 20 * uint64_t{kPacket};
    header.iteration = input.Byte() % 4;
    header.flags = kFlagChecksum;
    header.length = ControlBytes(header.type).value_or(kPacket);
    std::vector<uint8_t> payload(header.length);
    const uint8_t odd = input.Byte();
    if ((odd & 1) != 0) header.offset = input.Word();
    if ((odd & 2) != 0) header.tensor = static_cast<uint32_t>(input.Word());
    if ((odd & 4) != 0) header.length = static_cast<uint32_t>(input.Word());
    if ((odd & 8) != 0) {
        header.length = input.Byte();
        payload.resize(header.length);
    }
    if (header.type == FrameType::kPush && (odd & 64) != 0) header.flags |= payload.empty() ? 0 : (kUpdateFlags | kFlagAcknowledge) & (header.tensor << 1);
    if ((odd & 16) != 0) header.flags = static_cast<uint16_t>(input.Word());
    if (header.type == FrameType::kDefine) {
        Definition define;
        define.bytes = (odd & 32) != 0 ? input.Word() : input.Byte() * uint64_t{4};
        define.dtype = input.Byte() % 9;
        define.op = input.Byte() % 5;
        define.whole = input.Byte() % 2;
        define.lane = input.Byte() % 3;
        define.from = input.Byte() % 5 - 1;
        define.to = input.Byte() % 5 - 1;
        define.at = input.Byte() % 4 - 1;
        const uint8_t update = input.Byte();
        define.update = update % 8 < 4 ? 0 : update % 8 - 3;
        define.staleness = update / 8 % 4 == 3 ? kUnbounded : update / 8 % 4;
        define.group = update / 32 % 2;
        payload.resize(Definition::kBytes);
        EncodeDefinition(define, payload.data());
    } else if (header.type == FrameType::kRule && (odd & 32) == 0) {
        payload.resize(kRuleBytes);
        EncodeRule(SomeRule(input), payload.data());
    } else if ((odd & 32) != 0) {
        const auto said = input.Bytes(payload.size());
        std::copy(said.begin(), said.end(), payload.begin());
    }
    if ((odd & 64) == 0) header.payload_crc = Crc32c(payload.data(), payload.size());
    if ((odd & 128) != 0) {  // of a tensor that is defined once: as NextSpec() has it
        Spec spec;
        spec.bytes = 256;
        spec.once = true;
        header.iteration = OnlyIteration(spec);
    }
    std::vector<uint8_t> frame(kHeaderBytes);
    Encode(header, frame.data());
    frame.insert(frame.end(), payload.begin(), payload.end());
    return frame;
}

Spec NextSpec(fuzz::Input& input) {
    Spec spec;
    const uint8_t how = input.Byte();
    if (how % 4 == 0) {
        spec.bytes = 256;
        spec.once = true;
        return spec;
    }
    spec.dtype = static_cast<DType>(input.Byte() % 8);
    spec.bytes = input.Byte() % (kTensorBytes / 8 + 1) * uint64_t{8};
    spec.op = static_cast<Op>(input.Byte() % 4);
    spec.whole = (how & 8) != 0;
    spec.urgent_first = (how & 16) != 0;
    spec.urgent_sums = !spec.urgent_first && (how & 64) != 0;
    spec.priority = input.Byte();
    spec.lane = input.Byte() % kLanes;
    if ((how & 7) == 7) {
        spec.dtype = DType::kF32;
        spec.op = Op::kSum;
        spec.whole = false;
        spec.lane = kUpdateLane;
        spec.update = static_cast<RuleKind>(1 + input.Byte() % 4);
        spec.staleness = (how & 32) != 0 ? input.Byte() % 3 : kUnbounded;
        spec.group = how >> 7;
        return spec;
    }
    spec.acknowledged = (how & 128) != 0;
    // one that has one sender or receiver is defined once
    if ((how & 32) != 0) {
        spec.once = true;
        ((how & 64) != 0 ? spec.from : spec.to) = input.Byte() % 3;
        if ((how & 128) != 0) spec.at = input.Byte() % 2;
    }
    return spec;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    fuzz::Input input(data, size);
    const uint8_t how = input.Byte();
    const bool works = (how & 1) != 0;
    NodeOptions options;
    options.server = 0;
    options.rank = works ? 0 : -1;
    options.tell_tables = !works;
    options.membership.world = kWorld;
    options.membership.servers = kServers;
    options.membership.lanes = kLanes;
    options.marks.resize(kLanes);
    options.membership.secret = {1};
    options.packet_bytes = kPacket;
    options.order = (how & 2) != 0 ? Order::kRank : Order::kArrival;
    options.deal_evenly = (how & 4) != 0;
    options.max_bytes = kTensors * kTensorBytes;
    options.max_tensors = kTensors;
    std::vector<uint8_t> memory(kTensors * kTensorBytes), into(kTensors * kTensorBytes);
    constexpr uint32_t kMail = 64;
    std::vector<uint8_t> mail(kMail * kTensorBytes);
    uint32_t defined = 0, mailed = 0;
    bool only_strangers = true;
    NodeSeam seam(std::move(options));
    Node& node = *seam.node;
    while (!input.empty()) {
        const uint8_t deed = input.Byte();
        NodeSeam::Peer& peer = seam.peers[deed / 8 % seam.peers.size()];
        only_strangers = only_strangers && &peer == &seam.peers.front();
        switch (deed % 8) {
            case 0:
            case 1: {
                std::vector<uint8_t> frame = std::move(peer.held);
                peer.held.clear();
                const auto more = Frame(input);
                frame.insert(frame.end(), more.begin(), more.end());
                if (deed % 8 == 1) {
                    const size_t now = input.Byte() % frame.size();
                    peer.held.assign(frame.begin() + static_cast<ptrdiff_t>(now), frame.end());
                    frame.resize(now);
                }
                seam.Say(peer, frame);
                break;
            }
            case 2: {
                const std::vector<uint8_t> rest = std::move(peer.held);
                peer.held.clear();
                seam.Say(peer, rest);
                break;
            }
            case 3: seam.Say(peer, input.Bytes(input.Byte())); break;
            case 4:
                if (!works || defined == kTensors) break;
                only_strangers = false;
                {
                    const Spec spec = NextSpec(input);
                    uint8_t* from = memory.data() + defined * kTensorBytes;
                    uint8_t* to = (input.Byte() & 1) != 0 ? from : into.data() + defined * kTensorBytes;
                    if (spec.once) {
                        node.Start(defined++, spec, from, to, true);
                    } else {
                        node.Define(defined++, spec, from, to);
                    }
                }
                break;
            case 5:
                only_strangers = false;
                if (const uint32_t tensor = input.Byte() % kTensors; works && tensor < defined && node.IsDone(tensor)) {
                    node.Push(tensor, true, false, tensor % 4 == 3 ? kFlagQuiet : 0);
                } else if (works) {
                    node.SetRule(tensor % 2, SomeRule(input));
                }
                break;
            case 6:
                only_strangers = false;
                if (works) {
                    const uint32_t below = input.Byte() % (kTensors + 1);
                    bool over = true;
                    for (uint32_t each = 0; each < below; ++each) over = over && node.IsDone(each);
                    if (over) node.ForgetBelow(below);
                } else {
                    seam.HangUp(peer);
                }
                break;
            default:
                switch (const uint8_t what = input.Byte(); what % 4) {
                    case 0: seam.Listen(peer); break;
                    case 1: seam.HangUp(peer); break;
                    default:  // a message: sizes at which it is sent whole, is offered, and has several parts
                        only_strangers = false;
                        if (!works) break;
                        if (what % 4 == 2) {
                            node.Send(1, what / 4 % 4, what / 64, memory.data(), what / 16 * uint64_t{40});
                        } else {
                            const uint64_t bytes = what / 16 * uint64_t{40};
                            node.Receive(what / 4 % 2 == 0 ? kAnyone : 1, what / 8 % 2, mail.data() + mailed % kMail * kTensorBytes, bytes);
                            ++mailed;
                        }
                        break;
                }
                break;
        }
        if (only_strangers) MUST(node.failure().code == Code::kNone);
        // at most what all workers send, twice as wide, and what came early; parameters are not counted here
        MUST(seam.held_bytes() <= size_t{64 << 20} + 4 * kWorld * kTensors * (kTensorBytes + kPacket) + kWorld * Messages::kCreditBytes);
    }
    return 0;
}
