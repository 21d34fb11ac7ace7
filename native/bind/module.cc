// The seam between Python and the data plane: integers in and integers out. Memory is passed as an
// address, whose owner (gradlane.transport) keeps it alive; every call that can wait releases the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "bind/bind.h"
#include "bind/wait.h"
#include "digest/crc32c.h"
#include "node/node.h"
#include "wire/frame.h"

namespace nb = nanobind;
using namespace gradlane;

namespace {

using FailureTuple = std::tuple<int, int, int, std::string>;  // code, rank, server, text

FailureTuple AsTuple(const Failure& failure) {
    return {static_cast<int>(failure.code), failure.rank, failure.server, failure.text};
}

Digest AsDigest(nb::bytes bytes) {
    Digest digest{};
    if (bytes.size() != digest.size()) throw std::invalid_argument("fingerprint: expected 32 bytes");
    std::memcpy(digest.data(), bytes.data(), digest.size());
    return digest;
}

Spec MakeSpec(uint64_t bytes, uint8_t dtype, uint8_t op, int32_t from, int32_t to, int32_t at, bool whole, bool urgent_first,
              uint32_t priority, uint16_t lane, bool once) {
    if (!IsValidDType(dtype)) throw std::invalid_argument("dtype: not one that is known");
    if (!IsValidOp(op)) throw std::invalid_argument("op: not one that is known");
    Spec spec;
    spec.bytes = bytes;
    spec.dtype = static_cast<DType>(dtype);
    spec.op = static_cast<Op>(op);
    spec.from = from;
    spec.to = to;
    spec.at = at;
    spec.whole = whole;
    spec.urgent_first = urgent_first;
    spec.priority = priority;
    spec.lane = lane;
    spec.once = once;
    return spec;
}

std::unique_ptr<Node> StartNode(int32_t rank, int32_t server, uint32_t world, uint32_t servers, uint64_t job, uint64_t generation,
                                nb::bytes fingerprint, nb::bytes secret, const std::string& address, uint16_t port,
                                uint32_t packet_bytes, bool rank_order, bool checksum, bool deal_evenly, bool tell_tables,
                                const std::vector<std::tuple<uint8_t, uint8_t>>& marks, uint32_t unsent_bytes,
                                uint32_t send_buffer_bytes, const std::string& congestion, uint32_t ping_ms, uint32_t dead_ms,
                                uint32_t linger_ms, uint32_t greeting_ms, uint64_t max_bytes) {
    NodeOptions options;
    options.rank = rank;
    options.server = server;
    options.membership.world = world;
    options.membership.servers = servers;
    options.membership.lanes = static_cast<uint16_t>(marks.size());
    options.membership.job = job;
    options.membership.generation = generation;
    options.membership.fingerprint = AsDigest(fingerprint);
    const auto* key = static_cast<const uint8_t*>(secret.data());
    options.membership.secret.assign(key, key + secret.size());
    options.address = address;
    options.port = port;
    options.packet_bytes = packet_bytes;
    options.order = rank_order ? Order::kRank : Order::kArrival;
    options.checksum = checksum;
    options.deal_evenly = deal_evenly;
    options.tell_tables = tell_tables;
    options.marks.clear();
    for (const auto& [dscp, priority] : marks) options.marks.push_back({dscp, priority});
    options.socket.unsent_bytes = unsent_bytes;
    options.socket.send_buffer_bytes = send_buffer_bytes;
    options.socket.congestion = congestion;
    options.ping_ms = ping_ms;
    options.dead_ms = dead_ms;
    options.linger_ms = linger_ms;
    options.greeting_ms = greeting_ms;
    options.max_bytes = max_bytes;
    Failure why;
    std::unique_ptr<Node> node = Node::Start(std::move(options), &why);
    if (!node) {
        const std::string text = std::to_string(static_cast<int>(why.code)) + ":" + why.text;
        throw std::runtime_error(text);
    }
    return node;
}

template <typename T>
T* At(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

nb::bytes EncodedHeader(uint8_t type, uint16_t flags, uint32_t tensor, uint64_t offset, uint32_t length, uint32_t iteration,
                        uint32_t priority, uint16_t sender, uint32_t payload_crc) {
    Header header;
    header.type = static_cast<FrameType>(type);
    header.flags = flags;
    header.tensor = tensor;
    header.offset = offset;
    header.length = length;
    header.iteration = iteration;
    header.priority = priority;
    header.sender = sender;
    header.payload_crc = payload_crc;
    uint8_t bytes[kHeaderBytes];
    Encode(header, bytes);
    return nb::bytes(bytes, sizeof bytes);
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a node in a forked child is never destroyed: its thread and its locks are not there
    module.doc() = "gradlane's data plane: packets, sums and connections. Use it through gradlane.transport.";

    BindDispatcher(module);
    nb::class_<Transfer>(module, "Transfer");
    nb::class_<Node> node(module, "Node");
    node
        .def("port", &Node::port)
        .def("dial", [](Node& node, uint32_t server, const std::string& address, uint16_t port) {
            nb::gil_scoped_release released;
            node.Dial(server, address, port);
        })
        .def("join", [](Node& node, int64_t timeout_ms) {
            std::string missing;
            const bool joined = WaitInTurns(timeout_ms, [&](int64_t turn_ms) {
                const bool is_there = node.Join(turn_ms, &missing);
                return std::make_pair(is_there, is_there);
            });
            return std::make_tuple(joined, missing);
        })
        .def("define", [](Node& node, uint32_t tensor, uintptr_t from, uintptr_t into, uint64_t bytes, uint8_t dtype, uint8_t op,
                          int32_t sender, int32_t receiver, int32_t at, bool whole, bool urgent_first, bool urgent_sums, uint32_t priority,
                          uint16_t lane, bool acknowledged, uint8_t update, uint32_t staleness, uint32_t group) {
            Spec spec = MakeSpec(bytes, dtype, op, sender, receiver, at, whole, urgent_first, priority, lane, false);
            if (!IsValidRuleKind(update)) throw std::invalid_argument("update: not a kind of rule that is known");
            spec.urgent_sums = urgent_sums;
            spec.acknowledged = acknowledged;
            spec.update = static_cast<RuleKind>(update);
            spec.staleness = staleness;
            spec.group = group;
            node.Define(tensor, spec, At<const void>(from), At<void>(into));
        }, nb::arg("tensor"), nb::arg("from_address"), nb::arg("into_address"), nb::arg("size_bytes"), nb::arg("dtype"),
           nb::arg("op") = 0, nb::arg("sender") = kAll, nb::arg("receiver") = kAll, nb::arg("at") = kDealt, nb::arg("whole") = false,
           nb::arg("urgent_first") = false, nb::arg("urgent_sums") = false, nb::arg("priority") = 0, nb::arg("lane") = 0,
           nb::arg("acknowledged") = false, nb::arg("update") = 0, nb::arg("staleness") = 0, nb::arg("group") = 0)
        .def("push", &Node::Push, nb::arg("tensor"), nb::arg("notify") = true, nb::arg("notify_sent") = false, nb::arg("flags") = 0,
           nb::arg("held") = false)
        .def("release", &Node::Release)
        .def("set_rule", [](Node& node, uint32_t group, uint8_t kind, double lr, double weight_decay, double momentum, double dampening,
                            double beta1, double beta2, double epsilon, bool nesterov, bool maximize) {
            if (!IsValidRuleKind(kind)) throw std::invalid_argument("kind: not a rule that is known");
            Rule rule;
            rule.kind = static_cast<RuleKind>(kind);
            rule.nesterov = nesterov;
            rule.maximize = maximize;
            rule.lr = lr;
            rule.weight_decay = weight_decay;
            rule.momentum = momentum;
            rule.dampening = dampening;
            rule.beta1 = beta1;
            rule.beta2 = beta2;
            rule.epsilon = epsilon;
            if (const char* why = WhyNot(rule)) throw std::invalid_argument(why);
            node.SetRule(group, rule);
        }, nb::arg("group"), nb::arg("kind"), nb::kw_only(), nb::arg("lr"), nb::arg("weight_decay") = 0, nb::arg("momentum") = 0,
           nb::arg("dampening") = 0, nb::arg("beta1") = 0, nb::arg("beta2") = 0, nb::arg("epsilon") = 0, nb::arg("nesterov") = false,
           nb::arg("maximize") = false)
        .def("start", [](Node& node, uint32_t tensor, uintptr_t from, uintptr_t into, uint64_t bytes, uint8_t dtype, uint8_t op,
                         int32_t sender, int32_t receiver, int32_t at, bool urgent_first, uint32_t priority, bool notify, uint64_t of_bytes) {
            Spec spec = MakeSpec(bytes, dtype, op, sender, receiver, at, false, urgent_first, priority, 0, true);
            spec.of_bytes = of_bytes;
            node.Start(tensor, spec, At<const void>(from), At<void>(into), notify);
        }, nb::arg("tensor"), nb::arg("from_address"), nb::arg("into_address"), nb::arg("size_bytes"), nb::arg("dtype"),
           nb::arg("op") = 0, nb::arg("sender") = kAll, nb::arg("receiver") = kAll, nb::arg("at") = kDealt,
           nb::arg("urgent_first") = false, nb::arg("priority") = 0, nb::arg("notify") = false, nb::arg("of_bytes") = 0)
        // each part: rank, dtype, address and bytes of what is sent; dtype, address and bytes of what is received
        .def("exchange", [](Node& node, uint32_t tensor, uint32_t priority,
                            const std::vector<std::tuple<uint32_t, uint8_t, uintptr_t, uint64_t, uint8_t, uintptr_t, uint64_t>>& given) {
            std::vector<Node::ExchangePart> parts;
            for (const auto& [rank, from_dtype, from, from_bytes, into_dtype, into, into_bytes] : given) {
                if (!IsValidDType(from_dtype) || !IsValidDType(into_dtype)) throw std::invalid_argument("dtype: not one that is known");
                parts.push_back({rank, static_cast<DType>(from_dtype), static_cast<DType>(into_dtype), At<const uint8_t>(from), from_bytes,
                                 At<uint8_t>(into), into_bytes});
            }
            node.Exchange(tensor, priority, std::move(parts));
        })
        .def("forget_below", &Node::ForgetBelow)
        .def("wait", [](Node& node, uint32_t tensor, int64_t timeout_ms) {
            return WaitInTurns(timeout_ms, [&](int64_t turn_ms) {
                const bool is_there = node.Wait(tensor, turn_ms);
                return std::make_pair(is_there, is_there);
            });
        })
        .def("is_done", &Node::IsDone)
        .def("take", [](Node& node, int64_t timeout_ms) {
            return WaitInTurns(timeout_ms, [&](int64_t turn_ms) {
                auto taken = node.Take(turn_ms);
                const bool is_there = !taken.empty();
                return std::make_pair(is_there, std::move(taken));
            });
        })
        .def("await_goodbyes", [](Node& node, int64_t timeout_ms) {
            return WaitInTurns(timeout_ms, [&node](int64_t turn_ms) {
                const bool left = node.AwaitGoodbyes(turn_ms);
                return std::make_pair(left, left);
            });
        })
        .def("send", [](Node& node, uint32_t rank, uint32_t tag, uint32_t priority, uintptr_t from, uint64_t bytes) {
            return node.Send(rank, tag, priority, At<const void>(from), bytes);
        })
        .def("receive", [](Node& node, int32_t from, uint32_t tag, uintptr_t into, uint64_t bytes) {
            return node.Receive(from, tag, At<void>(into), bytes);
        })
        .def("wait_for", [](Node& node, const Transfer& transfer, int64_t timeout_ms) {
            return WaitInTurns(timeout_ms, [&](int64_t turn_ms) {
                const bool is_over = node.WaitFor(transfer, turn_ms);
                return std::make_pair(is_over, is_over);
            });
        })
        .def("is_over", [](Node& node, const Transfer& transfer) {
            bool over = false;
            const int32_t rank = node.IsOver(transfer, &over);
            return std::make_tuple(over, rank);
        })
        .def("abort", &Node::Abort, nb::call_guard<nb::gil_scoped_release>())
        .def("failure", [](Node& node) { return AsTuple(node.failure()); })
        .def("stats", [](Node& node) {
            const NodeStats stats = node.stats();
            nb::dict dict;
            dict["sent_bytes"] = stats.sent_bytes;
            dict["received_bytes"] = stats.received_bytes;
            dict["sent_packets"] = stats.sent_packets;
            dict["received_packets"] = stats.received_packets;
            dict["held_bytes"] = stats.held_bytes;
            dict["most_held_bytes"] = stats.most_held_bytes;
            dict["refused"] = stats.refused;
            dict["wakeups"] = stats.wakeups;
            return dict;
        })
        .def("close", &Node::Close, nb::call_guard<nb::gil_scoped_release>());

    BindEngine(module, node);
    BindHost(module, node);
    BindHeartbeat(module);

    module.def("start_node", &StartNode, nb::arg("rank"), nb::arg("server"), nb::arg("world"), nb::arg("servers"), nb::arg("job"),
               nb::arg("generation"), nb::arg("fingerprint"), nb::arg("secret"), nb::arg("address"), nb::arg("port"),
               nb::arg("packet_bytes"), nb::arg("rank_order"), nb::arg("checksum"), nb::arg("deal_evenly"), nb::arg("tell_tables"),
               nb::arg("marks"), nb::arg("unsent_bytes"), nb::arg("send_buffer_bytes"), nb::arg("congestion"), nb::arg("ping_ms"),
               nb::arg("dead_ms"), nb::arg("linger_ms"), nb::arg("greeting_ms"), nb::arg("max_bytes"),
               "Raises RuntimeError 'CODE:text' where the options or the system do not allow it.");
    module.def("encode_header", &EncodedHeader, nb::arg("type"), nb::arg("flags"), nb::arg("tensor"), nb::arg("offset"),
               nb::arg("length"), nb::arg("iteration"), nb::arg("priority"), nb::arg("sender"), nb::arg("payload_crc"));
    module.def("crc32c", [](nb::bytes data) { return Crc32c(data.data(), data.size()); });
}
