"""SimulatedWorker: what one worker of one job computes, in virtual time.

A worker knows when its gradients are ready, and starts messages through its Dispatcher. It runs a layer's forward
pass when the tensors that this layer is the first to use have arrived and were updated. It knows nothing of the
network.
"""

from __future__ import annotations

from gradlane.core.plan import Plan, returns_whole
from gradlane.core.profile import Profile
from gradlane.core.timeline import Kind, Span, Timeline
from gradlane.schedule import NativeDispatcher
from gradlane.sim.passes import PPM, ForwardPass, tensors_by_layer


class SimulatedWorker:
    """One worker. Its owner tells it of gradients, pushes and pulls, and asks when the next
    backward pass begins.

    All times are in ns on the simulation's clock. A worker raises nothing for a legal history.
    """

    def __init__(
        self, number: int, job: int, plan: Plan, profile: Profile, iterations: int, updates_here: bool, receives: bool = True
    ) -> None:
        """Prepare a worker whose first forward pass has not begun.

        Args:
            number: the worker's rank among all workers of the simulation.
            job: the index of its job.
            plan: what the job's Dispatchers carry out.
            profile: the job's computation.
            iterations: how many backward passes to run, 1 or more.
            updates_here: whether the worker updates parameters; else servers do.
            receives: whether the timeline has a "receive" span for each message, because sums come
                back apart from sending.
        """
        self.number, self.job, self.plan, self.profile = number, job, plan, profile
        self.iteration = -1  # the backward pass under way or last run
        self.pushed_iterations = 0
        self._iterations = iterations
        self._updates_here = updates_here
        self._receives = receives
        self._tensors_of = tensors_by_layer(profile)
        self._forward = ForwardPass(profile, plan.crosses_barrier, self)
        self._dispatcher = NativeDispatcher(plan)
        self._messages_of = [len(messages) for messages in plan.messages_by_tensor]
        self._spans: list[Span] = []
        self._sent: dict[int, tuple[int, int]] = {}  # when, and its place among the spans
        self._pushed: dict[int, int] = {}
        self._missing = [0] * len(plan.tensors)
        self._missing_of_layer = [0] * len(profile.layers)
        self._arrived = [0] * len(plan.tensors)
        self._latest = [0] * len(profile.layers)  # of the arrivals of a layer's tensors
        self._missing_at_all = 0
        self._unpushed = 0
        self._free_ns = 0  # the compute thread is busy until then
        self._step_start = 0
        self._layer = 0
        self._scale_ppm = PPM

    def scaled(self, time_ns: int) -> int:
        """A time of the profile, in ns, as this worker takes it in the present iteration."""
        return time_ns * self._scale_ppm // PPM

    # -- backward ------------------------------------------------------------------------------------------

    def begin_backward(self, now_ns: int) -> None:
        """The forward pass has ended and gradients begin to become ready."""
        self.iteration += 1
        self._dispatcher.begin()
        self._free_ns = now_ns + self.scaled(self.profile.backward_ns)
        self._span("backward", self.iteration, -1, now_ns, self._free_ns)
        self._missing = list(self._messages_of)
        self._missing_of_layer = [len(tensors) for tensors in self._tensors_of]
        self._missing_at_all = len(self.plan.tensors)
        self._unpushed = len(self.plan.messages)
        self._layer = 0

    def ready(self, tensor: int, now_ns: int) -> list[int]:
        """A gradient is ready. Returns the messages to start."""
        self._span("ready", self.iteration, tensor, now_ns, now_ns)
        return self._started(self._dispatcher.ready(tensor), now_ns)

    def pushed(self, message: int, now_ns: int) -> list[int]:
        """`message` has left for the servers. Returns the messages to start."""
        begun, place = self._sent[message]
        self._spans[place] = Span("send", self.iteration, message, begun, now_ns)
        self._pushed[message] = now_ns
        self._unpushed -= 1
        if not self._unpushed:
            self.pushed_iterations += 1
        return self._started(self._dispatcher.finished(message), now_ns)

    def awaits(self, message: int) -> bool:
        """Whether another message waits for the room that the end of `message` makes."""
        return message in self._dispatcher.blocking()

    def asks_for(self, message: int) -> bool:
        """Whether the next start of `message` is its second half: the servers have the message."""
        return self._dispatcher.in_second_phase(message)

    def pulled(self, message: int, now_ns: int) -> list[int]:
        """The sum of `message` is here. Returns the messages to start."""
        # packets come back while others are still sent, except those of a two-phase message, whose
        # sum was asked for
        two_phase = self.plan.messages[message].two_phase
        if self._receives:
            begun = self._pushed[message] if returns_whole(self.plan.wire) or two_phase else self._sent[message][0]
            self._span("receive", self.iteration, message, begun, now_ns)
        for tensor in {piece.tensor for piece in self.plan.messages[message].slices}:
            self._missing[tensor] -= 1
            if not self._missing[tensor]:
                layer = self.profile.tensors[tensor].layer
                self._arrived[tensor] = self._latest[layer] = now_ns
                self._missing_of_layer[layer] -= 1
                self._missing_at_all -= 1
        return self._started(self._dispatcher.finished(message), now_ns) if two_phase else []

    def _started(self, messages: list[int], now_ns: int) -> list[int]:
        for message in messages:
            if self.asks_for(message):
                self._pushed[message] = now_ns
                continue
            # sends stand in the order of their start, whichever ends first
            self._sent[message] = now_ns, len(self._spans)
            self._span("send", self.iteration, message, now_ns, now_ns)
        return messages

    # -- forward -------------------------------------------------------------------------------------------

    def begin_first_forward(self, scale_ppm: int) -> None:
        """Run the forward pass before the first backward pass, which waits for nothing.

        Args:
            scale_ppm: the compute times of the first iteration, in millionths of the profile's.
        """
        self._scale_ppm = scale_ppm
        self._free_ns = self._forward.run_freely(range(len(self.profile.layers)), self._free_ns, scale_ppm)

    def hold_until(self, now_ns: int) -> None:
        """The next forward pass may not begin before `now_ns`: this worker is too far ahead of the
        others.
        """
        if now_ns > self._free_ns:
            self.waited(-1, self._free_ns, now_ns)
            self._free_ns = now_ns

    @property
    def waits_to_begin_forward(self) -> bool:
        """Whether the next forward pass has run no layer yet."""
        return self._layer == 0 and self.iteration >= 0

    def forward(self, next_scale_ppm: int) -> int | None:
        """Run those layers of the forward pass whose tensors have arrived.

        Args:
            next_scale_ppm: the compute times of the iteration that begins with this forward pass,
                in millionths of the profile's.

        Returns:
            When the forward pass ends, in ns; None while tensors are missing.
        """
        if self._layer == 0:
            if self._missing_of_layer[0] if self.plan.crosses_barrier else self._missing_at_all:
                return None
            self._free_ns = self._forward.begin(self._free_ns, self._latest, self._scale_ppm, self._update_ppm)
            self._span("step", self.iteration, -1, self._step_start, self._free_ns)
            self._step_start = self._free_ns
            self._scale_ppm = next_scale_ppm
        layers = len(self.profile.layers)
        stop = self._layer
        while stop < layers and not self._missing_of_layer[stop]:
            stop += 1
        now_ns, here = self._free_ns, range(self._layer, stop)
        self._free_ns = self._forward.run(here, now_ns, self._latest, self._scale_ppm, self._update_ppm)
        self._layer = stop
        return self._free_ns if stop == layers else None

    @property
    def _update_ppm(self) -> int:
        return self._scale_ppm if self._updates_here else 0

    # -- what the forward pass tells -----------------------------------------------------------------------

    def waited(self, layer: int, start_ns: int, end_ns: int) -> None:
        """`Observer.waited`.

        The span names the tensor that came last, and the iteration whose sums were waited for.
        """
        tensor = max(self._tensors_of[layer], key=self._arrived.__getitem__) if layer >= 0 else -1
        self._span("wait", max(self.iteration, 0), tensor, start_ns, end_ns)

    def updated(self, layer: int, start_ns: int, end_ns: int) -> None:
        """`Observer.updated`."""
        for tensor in self._tensors_of[layer]:
            self._span("update", self.iteration, tensor, start_ns, end_ns)

    def ran(self, layer: int, start_ns: int, end_ns: int) -> None:
        """`Observer.ran`."""
        for tensor in self._tensors_of[layer]:
            self._span("use", self.iteration + 1, tensor, start_ns, start_ns)
        self._span("forward", self.iteration + 1, layer, start_ns, end_ns)

    @property
    def free_ns(self) -> int:
        """When the compute thread is next free."""
        return self._free_ns

    @property
    def is_last(self) -> bool:
        """Whether all backward passes have begun."""
        return self.iteration + 1 >= self._iterations

    # -- what is left --------------------------------------------------------------------------------------

    def _span(self, kind: Kind, iteration: int, subject: int, start_ns: int, end_ns: int) -> None:
        self._spans.append(Span(kind, iteration, subject, start_ns, end_ns))

    def timeline(self) -> Timeline:
        """What has happened so far, in order of start."""
        self._spans.sort(key=lambda span: span.start_ns)
        return Timeline(self.plan.fingerprint, self.number, tuple(self._spans))
