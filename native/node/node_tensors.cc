// Node's commands, and what becomes of a tensor from its definition to its end. All of it under the lock.

#include "node/node.h"

#include <algorithm>

#include "digest/crc32c.h"

namespace gradlane {

// -- commands ---------------------------------------------------------------------------------------------

void Node::RunCommands(bool inline_call) {
    while (true) {
        Command command;
        {
            std::lock_guard guard(command_mutex_);
            if (commands_.empty()) {
                soon_bytes_ = 0;
                break;
            }
            command = std::move(commands_.front());
            commands_.pop_front();
        }
        std::visit([this](const auto& asked) { Do(asked); }, command);
    }
    RunEngine();
    bool more = inline_call && RunShared(kInlineBytes);
    more |= inline_call && SendMail(Messages::kEagerBytes);
    more |= inline_call && aggregator_ && !failed_ && aggregator_->Work(kInlineBytes);
    more |= RunEngine();
    SweepOver();
    more |= FlushTouched(inline_call ? kInlineBytes : kWriteBudget);
    if (inline_call && (more || !resumed_.empty() || !RestShared())) Wake();
}

bool Node::Do(const DefineCommand& command) {
    return shared_ && SharedSums::Takes(command.spec) ? RegisterShared(command) : Register(command, -1);
}

void Node::Do(const StartCommand& command) {
    if (Do(command.define)) Do(command.push);
}

void Node::Do(const ForgetCommand& command) {
    for (auto each = tensors_.begin(); each != tensors_.end();) {
        if (each->first < command.below) {
            defined_bytes_ -= each->second.needed_bytes;
            if (aggregator_) aggregator_->Forget(each->first);
            each = tensors_.erase(each);
        } else {
            ++each;
        }
    }
    dealer_ = Dealer(options_.membership.servers);
    if (!options_.tell_tables) return;
    for (const auto& lanes : to_server_) {
        if (lanes[0] == nullptr) continue;
        lanes[0]->QueueControl(ControlFrame(FrameType::kForget, lanes[0]->sender, std::min(command.below, next_tensor_), nullptr, 0));
        Touch(*lanes[0]);
    }
}

void Node::Do(const AbortCommand& command) { Fail({Code::kAborted, options_.rank, options_.server, command.text}); }

// -- the plan that is carried out -------------------------------------------------------------------------

void Node::Do(const CarryOutCommand& command) {
    engine_ = command.engine;
    ended_.clear();
    to_start_.clear();
}

void Node::Do(const BeginCommand& command) {
    if (!failed_) engine_->OnBegin(command.iteration);
}

void Node::Do(const ReadyCommand& command) {
    if (failed_) return;
    if (!engine_->OnReady(command.tensor, command.at_ns, command.lacks, &to_start_)) {
        Fail({Code::kProtocol, options_.rank, -1,
              "gradient " + std::to_string(command.tensor) + " is not one of the plan's, became ready twice, or before the first iteration"});
        return;
    }
    StartMessages();
}

void Node::StartMessages() {
    for (size_t i = 0; i < to_start_.size() && !failed_; ++i) {
        const uint32_t message = to_start_[i];
        const bool is_second = engine_->Starting(message);
        for (uint32_t tensor = engine_->FirstOf(message); tensor < engine_->FirstOf(message + 1); ++tensor) {
            if (is_second) {
                Do(ReleaseCommand{tensor});
            } else {
                const uint16_t flags = engine_->IsQuiet(message) ? kFlagQuiet : 0;
                Do(PushCommand{tensor, true, true, flags, engine_->IsTwoPhase(message), true});
            }
        }
    }
    to_start_.clear();
}

// Tells the engine what was sent and what is done, and starts what follows. Never while a tensor's state
// or the aggregator is being worked on: starting a message changes both. Returns whether it has heard
// anything: then there may be more to sum and to send.
bool Node::RunEngine() {
    if (ended_.empty()) return false;
    for (size_t i = 0; i < ended_.size() && !failed_; ++i) {
        const bool is_sent = ended_[i] < 0;
        const auto tensor = static_cast<uint32_t>(is_sent ? ~ended_[i] : ended_[i]);
        if (is_sent) {
            engine_->OnSent(tensor, &to_start_);
        } else {
            engine_->OnDone(tensor, &to_start_);
        }
        StartMessages();
    }
    ended_.clear();
    return true;
}

// -- tensors ----------------------------------------------------------------------------------------------

std::shared_ptr<const Layout> Node::Cut(uint32_t tensor, const Spec& spec) {
    if (spec.rail) return CutForRail(tensor, spec);
    if (!options_.deal_evenly) return dealer_.Cut(spec.bytes, options_.packet_bytes, spec.at);
    return CutAlone(tensor, spec.bytes, options_.membership.servers, spec.at);
}

// Of a tensor, or of a rail's part of it, that is dealt to `servers` without regard to other tensors.
std::shared_ptr<const Layout> Node::CutAlone(uint32_t tensor, uint64_t bytes, uint32_t servers, int32_t at) const {
    if (at == kDealt && bytes <= kSmallestCut) at = static_cast<int32_t>(tensor % servers);
    if (at == kDealt) return Dealer::CutEvenly(bytes, options_.packet_bytes, servers);
    return Dealer(servers).Cut(bytes, options_.packet_bytes, at);
}

// Whether the tensor can be here, with what it is cut into and what it takes in `state`; else the node has failed of it.
bool Node::Admit(const DefineCommand& command, int32_t teller, Tensor* state) {
    const auto& [tensor, spec, from, into] = command;
    const std::string name = "tensor " + std::to_string(tensor) + (teller < 0 ? "" : ", told by rank " + std::to_string(teller));
    const auto refuse = [&](const std::string& why) {
        Fail({Code::kProtocol, teller < 0 ? options_.rank : teller, teller < 0 ? options_.server : -1, name + ": " + why});
        return false;
    };
    const Membership& job = options_.membership;
    const auto world = static_cast<int64_t>(job.world);
    if (const char* why = WhyNot(spec)) return refuse(why);
    if (options_.tell_tables && (spec.from != kAll || spec.to != kAll)) return refuse("a tensor of one sender or receiver, beside which no server is");
    if (tensor != next_tensor_ || spec.lane >= job.lanes || spec.at >= static_cast<int64_t>(job.servers) || spec.from >= world || spec.to >= world) {
        return refuse("not a definition that can be used");
    }
    const uint64_t allowed = options_.max_bytes - defined_bytes_, packets = spec.bytes / options_.packet_bytes + 1;
    const auto fits = [&](uint64_t bytes) {
        if (bytes <= allowed && tensors_.size() < options_.max_tensors) return true;
        Fail({Code::kFull, options_.rank, options_.server,
              name + " of " + std::to_string(spec.bytes) + " bytes needs up to " + std::to_string(bytes) + " bytes of memory here: " +
                  std::to_string(tensors_.size()) + " others need " + std::to_string(defined_bytes_) + ", and " +
                  std::to_string(options_.max_bytes) + " are allowed"});
        return false;
    };
    // before it is cut: to note its packets takes memory too, and their number is one of 32 bits
    const uint64_t own = options_.rank < 0 ? 0 : spec.bytes;
    if (packets > UINT32_MAX / 2) return refuse("more packets than can be counted");
    if (!fits(own + packets * sizeof(Piece))) return false;
    state->layout = Cut(tensor, spec);
    state->needed_bytes = own + (aggregator_ ? aggregator_->NeededBytes(spec, *state->layout) : 0);
    return fits(state->needed_bytes);
}

bool Node::Register(const DefineCommand& command, int32_t teller) {
    const auto& [tensor, spec, from, into] = command;
    Tensor state;
    if (failed_ || !Admit(command, teller, &state) || (spec.once && IsExchangedByOthers(tensor))) return false;
    ++next_tensor_;
    defined_bytes_ += state.needed_bytes;
    state.spec = spec;
    state.from = from;
    state.into = into;
    if (options_.rank >= 0) {
        state.contributes = spec.from == kAll || spec.from == options_.rank;
        state.receives = spec.to == kAll ? spec.from != options_.rank : spec.to == options_.rank;
        state.received.resize((state.layout->packets + 63) / 64);
    }
    if (aggregator_) {
        const size_t here = state.layout->by_server[static_cast<size_t>(options_.server)].size();
        if (teller >= 0) most_served_ = std::max(most_served_, served_ += here);
        // one that is defined once is forgotten when its last packet is summed: with none here, it never would be
        if (here != 0 || !spec.once) aggregator_->Define(tensor, spec, state.layout);
    }
    tensors_.insert_or_assign(tensor, std::move(state));
    if (options_.tell_tables && options_.rank >= 0) {
        uint8_t payload[Definition::kBytes];
        EncodeDefinition(AsDefinition(spec), payload);
        for (const auto& lanes : to_server_) {
            if (lanes[0] == nullptr) continue;
            lanes[0]->QueueControl(ControlFrame(FrameType::kDefine, lanes[0]->sender, tensor, payload, sizeof payload));
            Touch(*lanes[0]);
        }
    }
    TakeEarly(tensor);
    ResumeParked(tensor);
    return true;
}

void Node::Do(const SetRuleCommand& command) {
    const auto& [group, rule] = command;
    if (failed_) return;
    uint8_t payload[kRuleBytes];
    EncodeRule(rule, payload);
    Rule said;  // as everybody else reads it: without numbers that its kind does not have
    const char* why = group < kMaxGroups ? DecodeRule(payload, &said) : "more groups than there can be";
    for (const auto& [tensor, state] : tensors_) {
        if (state.under_way && state.spec.update != RuleKind::kNone && state.spec.group == group) why = "its tensors are under way";
    }
    if (why != nullptr) {
        Fail({Code::kProtocol, options_.rank, -1, "the rule of group " + std::to_string(group) + ": " + why});
        return;
    }
    rules_[group] = said;
    if (aggregator_) aggregator_->SetRule(group, static_cast<uint32_t>(options_.rank), said);
    for (const auto& lanes : to_server_) {
        Connection* connection = lanes[kUpdateLane];
        if (connection == nullptr) continue;
        connection->QueueControl(ControlFrame(FrameType::kRule, connection->sender, group, payload, sizeof payload));
        Touch(*connection);
    }
}

void Node::Do(const PushCommand& command) {
    const auto& [tensor, notify, notify_sent, flags, held, by_engine] = command;
    if (failed_) return;
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end() || found->second.under_way || found->second.ways_left != 0) {
        Fail({Code::kProtocol, options_.rank, -1,
              "tensor " + std::to_string(tensor) + (found == tensors_.end() ? " was never defined" : " is under way already")});
        return;
    }
    Tensor& state = found->second;
    if (state.shared && Refuse(tensor, state.spec)) return;
    // what takes every worker to begin and to end cannot come to an end; of the rest, they may have done their part
    if (!state.shared && left_ns_ != 0 && state.spec.from == kAll && state.spec.to == kAll) {
        Fail({Code::kLeft, left_rank_, left_server_, left_name_ + " has left the job, and tensor " + std::to_string(tensor) + " was handed over"});
        return;
    }
    if ((flags & ~kUpdateFlags) != 0 || (flags != 0 && state.spec.update == RuleKind::kNone) ||
        (PartOf(flags) != Part::kSteps && static_cast<uint32_t>(PartOf(flags)) > StatesOf(state.spec.update)) ||
        (PartOf(flags) != Part::kParameters && state.pushes == 0)) {
        Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was handed over for what it does not have"});
        return;
    }
    if (state.spec.update != RuleKind::kNone && state.pushes != 0 && (flags & (kFlagQuiet | kFlagPlace)) == 0) {
        const auto rule = rules_.find(state.spec.group);
        if (rule == rules_.end() || rule->second.kind != state.spec.update) {
            Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was handed over, and its group has no rule of its kind"});
            return;
        }
    }
    const bool can_hold = aggregator_ && state.spec.from == kAll && state.spec.to == kAll && state.spec.update == RuleKind::kNone;
    if (held && !can_hold) {
        Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was to be held, and no server here sums it for all"});
        return;
    }
    state.held = held;
    state.notify = notify;
    state.notify_sent = notify_sent;
    state.by_engine = by_engine;
    if (state.shared) {
        PushShared(tensor, state);
    } else {
        Contribute(tensor, state, flags);
    }
}

// Sends the worker's part of the next iteration, and expects the result.
void Node::Contribute(uint32_t tensor, Tensor& state, uint16_t flags) {
    state.under_way = state.given = true;
    state.iteration = state.spec.once ? OnlyIteration(state.spec) : state.pushes++;
    std::fill(state.received.begin(), state.received.end(), 0);
    state.unsent = 0;
    state.unreceived = state.receives ? state.layout->packets : 0;
    for (uint32_t server = 0; server < to_server_.size() && state.contributes; ++server) {
        const auto places = static_cast<uint32_t>(state.layout->by_server[server].size());
        if (places == 0) continue;
        if (static_cast<int32_t>(server) == options_.server) {
            if (!state.receives) state.unsent += places;  // told by Consumed
            continue;
        }
        Connection* connection = to_server_[server][state.spec.lane];
        if (connection == nullptr) {
            Fail({Code::kDied, -1, static_cast<int32_t>(server), NameOfServer(server) + " is not connected"});
            return;
        }
        Run run;
        run.type = FrameType::kPush;
        run.tensor = tensor;
        run.flags = flags;
        run.iteration = state.iteration;
        run.priority = state.spec.priority;
        run.memory = state.from;
        run.layout = state.layout;
        run.server = server;
        run.end = places;
        run.acknowledged = state.spec.acknowledged;
        state.unsent += places;
        if (run.acknowledged) {
            state.unheard.resize(to_server_.size());
            state.unheard[server] = true;
            ++state.unsent;
        }
        Queue(*connection, QueuePriority(state.spec), std::move(run));
    }
    // no sum is whole without this worker's part, so that a server is held by keeping that back
    if (aggregator_ && !state.held && aggregator_->Has(tensor)) {
        aggregator_->ArriveLocally(tensor, state.iteration, state.from, state.into, flags);
    }
    Settle(tensor, state);
    TakeEarly(tensor);
    if (state.receives && !state.contributes) ResumeParked(tensor);  // the others need not wait for this one to send
}

void Node::Do(const ReleaseCommand& command) {
    const uint32_t tensor = command.tensor;
    if (failed_) return;
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end() || !found->second.held) {
        Fail({Code::kProtocol, options_.rank, -1, "tensor " + std::to_string(tensor) + " was released, and is not held"});
        return;
    }
    Tensor& state = found->second;
    state.held = false;
    if (!state.under_way) return;  // its host has no sum yet
    if (aggregator_->Has(tensor)) aggregator_->ArriveLocally(tensor, state.iteration, state.from, state.into);
    Settle(tensor, state);
}

// The worker's part has left, or need not be waited for.
void Node::Sent(uint32_t tensor, Tensor& state) {
    state.notify_sent = false;
    if (state.by_engine) {
        ended_.push_back(~static_cast<int64_t>(tensor));
        return;
    }
    std::lock_guard guard(done_mutex_);
    finished_.push_back(~static_cast<int64_t>(tensor));
    done_.notify_all();
}

void Node::Settle(uint32_t tensor, Tensor& state) {
    const bool has_sum = state.under_way && !state.held && state.unreceived == 0;
    if (state.awaited && state.ways_left == 1 && has_sum) {
        state.awaited = false;
        shared_->Ready(tensor);
    }
    if (state.notify_sent && state.given && state.unsent == 0) Sent(tensor, state);
    if (!has_sum || state.unsent != 0 || state.ways_left != 0) return;
    state.under_way = false;
    if (state.spec.once) {
        defined_bytes_ -= state.needed_bytes;
        over_.push_back(tensor);
    }
    if (state.by_engine) {
        ended_.push_back(tensor);
        return;
    }
    std::lock_guard guard(done_mutex_);
    open_.erase(tensor);
    if (state.notify) finished_.push_back(tensor);
    done_.notify_all();
}

// What was over while its state was in use.
void Node::SweepOver() {
    for (const uint32_t tensor : over_) tensors_.erase(tensor);
    over_.clear();
    for (const uint32_t tensor : summed_) aggregator_->Forget(tensor);
    summed_.clear();
}

// -- sums -------------------------------------------------------------------------------------------------

void Node::Return(uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                  uint32_t iteration, BufferRef sum) {
    const uint32_t crc = ChecksumOf(*layout, place, sum);
    for (uint32_t rank = 0; rank < to_worker_.size(); ++rank) {
        const auto signed_rank = static_cast<int32_t>(rank);
        if (spec.rail && std::find(hosts_->rail.begin(), hosts_->rail.end(), rank) == hosts_->rail.end()) continue;
        if (signed_rank == options_.rank || (spec.to != kAll ? spec.to != signed_rank : spec.from == signed_rank)) continue;
        QueueResult(rank, tensor, spec, layout, place, iteration, sum, crc);
    }
}

void Node::ReturnTo(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                    uint32_t iteration, BufferRef parameters) {
    const uint32_t crc = ChecksumOf(*layout, place, parameters);
    QueueResult(rank, tensor, spec, layout, place, iteration, std::move(parameters), crc);
}

// While the bytes are in the cache, and once for all connections that they leave on.
uint32_t Node::ChecksumOf(const Layout& layout, uint32_t place, const BufferRef& result) const {
    if (!options_.checksum) return 0;
    return Crc32c(result.data(), layout.by_server[static_cast<uint32_t>(options_.server)][place].length);
}

void Node::QueueResult(uint32_t rank, uint32_t tensor, const Spec& spec, const std::shared_ptr<const Layout>& layout, uint32_t place,
                       uint32_t iteration, BufferRef result, uint32_t crc) {
    Connection* connection = to_worker_[rank][spec.lane];
    if (connection == nullptr) return;  // it is lost, and the node has failed of it
    Run run;
    run.type = FrameType::kResult;
    run.tensor = tensor;
    run.iteration = iteration;
    run.priority = spec.priority;
    run.layout = layout;
    run.server = static_cast<uint32_t>(options_.server);
    run.next = place;
    run.end = place + 1;
    run.buffer = std::move(result);
    run.payload_crc = crc;
    Queue(*connection, spec.urgent_sums ? spec.priority : QueuePriority(spec), std::move(run), spec.urgent_sums);
}

void Node::Delivered(uint32_t tensor, uint32_t packets) {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) return;
    found->second.unreceived -= packets;
    Settle(tensor, found->second);
}

void Node::Consumed(uint32_t tensor, uint32_t packets) {
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end()) return;
    found->second.unsent -= packets;
    Settle(tensor, found->second);
}

// A server has all packets of a push. Returns whether it was asked to say so.
bool Node::OnReceived(const Connection& connection, const Header& header) {
    if (failed_) return true;
    const auto found = tensors_.find(header.tensor);
    if (found == tensors_.end()) return false;
    Tensor& state = found->second;
    if (connection.peer >= state.unheard.size() || !state.unheard[connection.peer]) return false;
    state.unheard[connection.peer] = false;
    --state.unsent;
    Settle(header.tensor, state);
    return true;
}

void Node::OnSent(Connection& connection, const Header& header) {
    if (failed_) return;
    if (IsMessage(header.type)) {
        messages_->OnSent(connection.peer, header);
        return;
    }
    const auto found = tensors_.find(header.tensor);
    if (found == tensors_.end()) return;
    --found->second.unsent;
    Settle(header.tensor, found->second);
}

}  // namespace gradlane
