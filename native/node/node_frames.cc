// What Node does with frames that came: packets of pushes and results, tables, rules, ends. All of it under the lock.

#include "node/node.h"

#include <algorithm>
#include <cstring>

namespace gradlane {

namespace {

constexpr size_t kMostEnded = 1024;        // ends of tensors whose author is remembered: far more than a job has plans
constexpr size_t kEarlyBytes = 64 << 20;  // of what came before this process knew its tensor; beyond it, whoever sends waits

// One lane a tensor: a connection receives one frame at a time, so no packet is ever admitted twice.
constexpr const char* kOtherLane = "a packet on another lane than its tensor's";

}  // namespace

Connection::Sink Node::OnHeader(Connection& connection, const Header& header) {
    if (connection.state == Connection::State::kGreeting) {
        if (IsData(header.type)) return Connection::Sink::Fault(Code::kAuth, "data before the greeting was over");
        return Connection::Sink::Take(connection.control_payload());
    }
    if (failed_ && IsData(header.type)) return Connection::Sink::Drop();
    switch (header.type) {
        case FrameType::kPush: return OnPushHeader(connection, header);
        case FrameType::kResult: return OnResultHeader(connection, header);
        case FrameType::kDefine:
        case FrameType::kForget:
            if (connection.dialled() || options_.rank >= 0) return Connection::Sink::Fault(Code::kProtocol, "a table that nobody asked for");
            return Connection::Sink::Take(connection.control_payload());
        case FrameType::kRule:
            if (connection.dialled() || connection.lane != kUpdateLane || header.tensor >= kMaxGroups) {
                return Connection::Sink::Fault(Code::kProtocol, "a rule that cannot be here");
            }
            return Connection::Sink::Take(connection.control_payload());
        case FrameType::kMessage:
        case FrameType::kPart:
        case FrameType::kAccept:
        case FrameType::kTaken: return OnMessageHeader(connection, header);
        case FrameType::kReceived:
            if (!connection.dialled()) return Connection::Sink::Fault(Code::kProtocol, "a worker that says it has a push");
            return Connection::Sink::Take(connection.control_payload());
        case FrameType::kPing:
        case FrameType::kAbort:
        case FrameType::kGoodbye: return Connection::Sink::Take(connection.control_payload());
        default: return Connection::Sink::Fault(Code::kProtocol, "a frame of the greeting after it was over");
    }
}

Connection::Sink Node::OnPushHeader(Connection& connection, const Header& header) {
    if (connection.dialled()) return Connection::Sink::Fault(Code::kProtocol, "a push from a server");
    if (header.length > options_.packet_bytes) return Connection::Sink::Fault(Code::kProtocol, "a packet larger than packets are here");
    if (!aggregator_->Has(header.tensor)) {
        if (IsShared(header.tensor)) return Connection::Sink::Fault(Code::kMismatch, "a packet of a tensor that is summed in this host's memory here");
        // whoever is ahead of this process waits, and holds up nobody but itself
        if (header.tensor >= next_tensor_) return Ahead(connection, header);
        const auto ended = std::lower_bound(ended_by_.begin(), ended_by_.end(), std::pair(header.tensor + 1, uint32_t{0}));
        if (header.tensor >= remembered_from_ && ended != ended_by_.end() && ended->second != connection.peer) {
            Fail({Code::kMismatch, static_cast<int32_t>(ended->second), -1,
                  "rank " + std::to_string(ended->second) + " has ended tensor " + std::to_string(header.tensor) +
                      ", and rank " + std::to_string(connection.peer) + " goes on with it"});
        }
        return Connection::Sink::Fault(OverCode(), OverText());
    }
    // whoever takes its sums has few on the way to it: no push of an iteration comes before the sum of the last was taken
    if (options_.rank < 0 && connection.queued_packets() > most_served_) {
        return Connection::Sink::Fault(Code::kProtocol, "pushes from one that does not take its sums");
    }
    const char* why = "";
    const int64_t place = aggregator_->Admit(header, connection.peer, &why);
    if (place < 0) return Connection::Sink::Fault(place == Aggregator::kDisagrees ? Code::kMismatch : Code::kProtocol, why);
    if (connection.lane != aggregator_->LaneOf(header.tensor)) return Connection::Sink::Fault(Code::kProtocol, kOtherLane);
    connection.place = static_cast<uint32_t>(place);
    connection.receiving = aggregator_->Take();
    return Connection::Sink::Take(connection.receiving.data());
}

// What is wrong with a packet of a tensor that is over. One that was dealt alone ends when all of its packets have come: a
// process that sends another means something else by it.
Code Node::OverCode() const { return options_.deal_evenly ? Code::kMismatch : Code::kProtocol; }
const char* Node::OverText() const { return options_.deal_evenly ? Aggregator::kAnotherMeaning : "a packet of a tensor that is over"; }

Connection::Sink Node::OnResultHeader(Connection& connection, const Header& header) {
    if (!connection.dialled()) return Connection::Sink::Fault(Code::kProtocol, "a result from a worker");
    if (IsAhead(header)) return Ahead(connection, header);
    Code code;
    const char* why;
    const int64_t bit = AdmitResult(header, connection.peer, &code, &why);
    if (bit < 0) return Connection::Sink::Fault(code, why);
    const Tensor& state = tensors_.at(header.tensor);
    if (connection.lane != state.spec.lane) return Connection::Sink::Fault(Code::kProtocol, kOtherLane);
    connection.place = static_cast<uint32_t>(bit);
    return Connection::Sink::Take(state.into + header.offset);
}

// Whether a result is one that this process waits for: its bit in Tensor::received, or -1 and why not.
int64_t Node::AdmitResult(const Header& header, uint32_t server, Code* code, const char** why) const {
    *code = Code::kProtocol;
    *why = "a result that nobody waits for";
    const auto found = tensors_.find(header.tensor);
    if (found == tensors_.end() || !found->second.under_way) return -1;
    const Tensor& state = found->second;
    const int64_t place = state.layout->Find(server, header.offset, header.length);
    if (!state.receives || header.iteration != state.iteration || place < 0) {
        if (state.spec.once) {
            *code = Code::kMismatch;
            *why = Aggregator::kAnotherMeaning;
        }
        return -1;
    }
    const uint64_t bit = state.layout->first[server] + static_cast<uint64_t>(place);
    *why = "the same packet a second time";
    return (state.received[bit / 64] >> (bit % 64) & 1) != 0 ? -1 : static_cast<int64_t>(bit);
}

// Of a tensor that this process will only come to. Its bytes are kept: to leave them in the socket would hold up what
// is behind them, which may be what this process waits for before it comes to that tensor.
Connection::Sink Node::Ahead(Connection& connection, const Header& header) {
    if (header.length > options_.packet_bytes) return Connection::Sink::Fault(Code::kProtocol, "a packet larger than packets are here");
    if (header.tensor >= next_tensor_ && header.tensor - next_tensor_ > options_.max_tensors) {
        return Connection::Sink::Fault(Code::kProtocol, "a tensor that cannot be");
    }
    if (early_buffers_.taken_bytes() + options_.packet_bytes > kEarlyBytes) {
        connection.parked_for = header.tensor;
        return Connection::Sink::Park();
    }
    connection.early = true;
    connection.receiving = early_buffers_.Take();
    return Connection::Sink::Take(connection.receiving.data());
}

// A push is ahead of a server that does not know its tensor; a result, also of a worker that has yet to say where to.
bool Node::IsAhead(const Header& header) const {
    if (header.tensor >= next_tensor_) return true;
    if (header.type == FrameType::kPush) return false;
    const auto found = tensors_.find(header.tensor);
    if (found == tensors_.end()) return false;
    const Tensor& state = found->second;
    return state.receives && !state.contributes && !state.under_way && !state.spec.once && header.iteration == state.pushes;
}

// What was kept of this tensor and can be used now.
void Node::TakeEarly(uint32_t tensor) {
    const auto found = early_.find(tensor);
    if (found == early_.end()) return;
    std::vector<Early> kept = std::move(found->second);
    early_.erase(found);
    for (Early& early : kept) {
        // a tensor is defined, and then pushed, under one lock: its results are ahead only until then
        if (early.header.type == FrameType::kResult && !tensors_.at(tensor).under_way) {
            early_[tensor].push_back(std::move(early));
        } else if (!OnEarly(std::move(early))) {
            return;
        }
    }
}

bool Node::OnEarly(Early early) {
    const Header& header = early.header;
    if (IsAhead(header)) {
        early_[header.tensor].push_back(std::move(early));
        return true;
    }
    const bool is_push = header.type == FrameType::kPush;
    Code code = OverCode();
    const char* why = OverText();
    int64_t place = -1;
    if (!is_push) {
        place = AdmitResult(header, early.peer, &code, &why);
    } else if (aggregator_->Has(header.tensor)) {
        place = aggregator_->Admit(header, early.peer, &why);
        if (place == Aggregator::kDisagrees) code = Code::kMismatch;
    }
    if (place < 0) {
        const auto peer = static_cast<int32_t>(early.peer);
        Fail({code, is_push ? peer : -1, is_push ? -1 : peer, (is_push ? "rank " : "server ") + std::to_string(peer) + ": " + why});
        return false;
    }
    if (is_push) {
        aggregator_->Arrive(header.tensor, static_cast<uint32_t>(place), early.peer, std::move(early.payload), header.flags);
        return true;
    }
    Tensor& state = tensors_.at(header.tensor);
    std::memcpy(state.into + header.offset, early.payload.data(), header.length);
    state.received[static_cast<size_t>(place) / 64] |= uint64_t{1} << (place % 64);
    --state.unreceived;
    Settle(header.tensor, state);
    return true;
}

bool Node::OnFrame(Connection& connection, const Header& header) {
    if (connection.state == Connection::State::kGreeting) return OnGreeting(connection, header);
    if (header.type == FrameType::kPush && (header.flags & kFlagAcknowledge) != 0 && !failed_) {
        connection.QueueControl(ControlFrame(FrameType::kReceived, connection.sender, header.tensor, nullptr, 0));
        Touch(connection);
    }
    if (connection.early) {
        connection.early = false;
        return OnEarly({connection.peer, header, std::move(connection.receiving)});
    }
    switch (header.type) {
        case FrameType::kPush:
            if (!aggregator_->Has(header.tensor)) {  // forgotten since its header came
                Lose(connection, Code::kProtocol, "a packet of a tensor that is over");
                return false;
            }
            aggregator_->Arrive(header.tensor, connection.place, connection.peer, std::move(connection.receiving),
                                header.flags);
            return true;
        case FrameType::kResult: {
            const auto found = tensors_.find(header.tensor);
            if (found == tensors_.end() || !found->second.under_way) return true;
            found->second.received[connection.place / 64] |= uint64_t{1} << (connection.place % 64);
            --found->second.unreceived;
            Settle(header.tensor, found->second);
            return true;
        }
        case FrameType::kDefine: return OnDefineFrame(connection, header);
        case FrameType::kRule: return OnRuleFrame(connection, header);
        case FrameType::kForget: return OnForgetFrame(connection, header);
        case FrameType::kAbort: {
            HearLast();
            Fail(Told(connection, ReadReason(connection.control_payload(), header.length)));
            return false;
        }
        case FrameType::kMessage:
        case FrameType::kPart:
        case FrameType::kAccept:
        case FrameType::kTaken: return OnMessageFrame(connection, header);
        case FrameType::kReceived:
            if (OnReceived(connection, header)) return true;
            Lose(connection, Code::kProtocol, "it says that it has a push, and was not asked");
            return false;
        case FrameType::kGoodbye: OnGoodbye(connection); return true;
        default: return true;
    }
}

bool Node::OnDefineFrame(Connection& connection, const Header& header) {
    const Definition define = DecodeDefinition(connection.control_payload());
    const auto told = told_.find(header.tensor);
    std::string difference;
    if (told != told_.end()) {
        if (told->second == define) return true;
        difference = "tensor " + std::to_string(header.tensor) + ": rank " + std::to_string(connection.peer) + " says " +
                     std::to_string(define.bytes) + " bytes of type " + std::to_string(define.dtype) + ", another said " +
                     std::to_string(told->second.bytes) + " of type " + std::to_string(told->second.dtype);
    } else if (header.tensor < next_tensor_) {
        return true;  // over already: this rank's word comes late
    } else if (!IsValidDType(define.dtype) || !IsValidOp(define.op) || define.from < kAll || define.to < kAll || define.at < kDealt ||
               !IsValidRuleKind(define.update)) {
        difference = "tensor " + std::to_string(header.tensor) + ": rank " + std::to_string(connection.peer) +
                     " tells a definition that cannot be";
    }
    if (!difference.empty()) {
        Fail({Code::kMismatch, static_cast<int32_t>(connection.peer), -1, difference});
        return false;
    }
    const auto teller = static_cast<int32_t>(connection.peer);
    if (!Register(DefineCommand{header.tensor, AsSpec(define), nullptr, nullptr}, teller)) return false;
    told_.emplace(header.tensor, define);
    return true;
}

// The first worker to end a tensor ends it for all: each has its sums when it says so, or soon will. Who says so before
// that is to blame, and not who goes on.
bool Node::OnForgetFrame(Connection& connection, const Header& header) {
    if (!ended_by_.empty() && header.tensor <= ended_by_.back().first) return true;  // others have said so before
    const auto blame = [&](const std::string& why) {
        Fail({Code::kMismatch, static_cast<int32_t>(connection.peer), -1, "rank " + std::to_string(connection.peer) + " has ended " + why});
        return false;
    };
    if (header.tensor > next_tensor_) return blame("tensors that nobody has told of");
    bool any = false;
    for (auto each = told_.begin(); each != told_.end();) {
        if (each->first >= header.tensor) {
            ++each;
            continue;
        }
        if (aggregator_->IsWaiting(each->first)) {
            return blame("tensor " + std::to_string(each->first) + ", of which sums are under way");
        }
        const auto state = tensors_.find(each->first);
        defined_bytes_ -= state->second.needed_bytes;
        served_ -= state->second.layout->by_server[static_cast<size_t>(options_.server)].size();
        aggregator_->Forget(each->first);
        tensors_.erase(state);
        each = told_.erase(each);
        any = true;
    }
    if (!any) return true;
    dealer_ = Dealer(options_.membership.servers);
    if (ended_by_.size() == kMostEnded) {
        remembered_from_ = ended_by_.front().first;
        ended_by_.pop_front();
    }
    ended_by_.emplace_back(header.tensor, connection.peer);
    return true;
}

bool Node::OnRuleFrame(Connection& connection, const Header& header) {
    Rule rule;
    if (const char* why = DecodeRule(connection.control_payload(), &rule)) {
        Lose(connection, Code::kProtocol, why);
        return false;
    }
    aggregator_->SetRule(header.tensor, connection.peer, rule);
    return true;
}

}  // namespace gradlane
