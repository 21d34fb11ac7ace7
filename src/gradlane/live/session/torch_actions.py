"""TorchActions: what the rules of `updates.py` do to parameters, gradients, optimizers and the network.

On a device all updates run on the stream on which `step()` ran, the home stream. Whatever uses parameters on
another stream was ordered by the script after `step()`, not after a later update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from gradlane.errors import described
from gradlane.live.backends.streams import Stream
from gradlane.live.comm.driver import Driver
from gradlane.live.comm.recorder import Recorder, now_ns
from gradlane.live.session import guarded_params, guarded_states, outdated, torch_patches
from gradlane.live.session.deferred_step import DeferredStep, as_at_step
from gradlane.live.session.finite import Unchecked
from gradlane.live.session.gradients import Gradients
from gradlane.live.session.guarding import Guarding
from gradlane.live.session.phases import Phase
from gradlane.live.session.step_observer import StepObserver
from gradlane.live.session.tracked import Tracked

_LOST = "was updated with a sum that never came: the update was queued on the device behind it, and the job failed before"
_RAISES_AT_ONCE = (
    "Mend what raises; or keep the barrier, with attach(cross_barrier=False) or a policy such as mg-wfbp: step() raises it then"
)
_LACKS = "lacks its update of the last step: step() had left it until its gradients are summed, and the job failed before"


class TorchActions(Guarding):
    """The `updates.Actions` of one session.

    Args:
        driver: the session's; has the sums.
        recorder: gets the times of updates.
        gradients: what stands in `.grad`.
        verifier: copies values as they pass.
        finite: is asked before each update.
        on_use: called with a guarded parameter before its first use.
        on_state: called before anything accesses the state of a guarded optimizer, or reads parameters in C++ by the
            ways that `torch_patches.py` knows.

    Attributes:
        home: the stream on which the last `step()` ran; None on the CPU.
        were_used_elsewhere: a parameter was used first on another stream than the home stream.
    """

    def __init__(
        self,
        driver: Driver,
        recorder: Recorder,
        gradients: Gradients,
        verifier: StepObserver,
        finite: Unchecked,
        on_use: Callable[[Tracked], None],
        on_state: Callable[[], None],
    ) -> None:
        super().__init__((), on_use)  # the parameters come with a plan
        self._driver, self._failures, self._recorder = driver, driver.failures, recorder
        self._gradients, self._verifier, self._finite = gradients, verifier, finite
        self._on_state = on_state
        self.check, self.wait_until = self._failures.check, self._failures.wait_until
        self.wait_for_all = driver.wait_for_all
        self.hide, self.show = gradients.hide, gradients.show
        self._half_done: str | None = None  # the optimizer whose step raised in the middle
        self.home: Stream | None = None
        self.were_used_elsewhere = False

    # -- threads ------------------------------------------------------------------------------------

    def look_at_waits(self) -> None:
        with self._failures.lock:
            self._failures.notify_if_awaited()

    # -- sums ---------------------------------------------------------------------------------------

    def wait_for(self, several: Sequence[Tracked]) -> None:
        self._driver.look()
        self._driver.wait_for([tracked.tensor for tracked in several])

    def arriving_with(self, tracked: Tracked, several: Sequence[Tracked]) -> list[Tracked]:
        late = set(self._driver.late_behind(tracked.tensor, [other.tensor for other in several]))
        return [other for other in several if other.tensor not in late]

    # -- guards -------------------------------------------------------------------------------------

    def guard_state(self, step: DeferredStep) -> None:
        guarded_states.watch(step.optimizer, self, self._on_state)
        torch_patches.before_leaving(self, self._on_state)

    def unguard_state(self, step: DeferredStep) -> None:
        guarded_states.unwatch(step.optimizer, self)

    def all_are_made(self) -> None:
        torch_patches.nothing_is_owed(self)

    def all_are_summed(self) -> None:
        if self._verifier.verifies:
            for tracked in self.tracked:
                if tracked.later:
                    self._verifier.arrived(tracked.param, tracked.slot)
        self._gradients.change_all()

    def refuse(self, tracked: Tracked, why: str) -> None:
        optimizer = tracked.step.optimizer
        guarded_params.unwatch((tracked,))
        outdated.refuse_reads(tracked.param, f"{tracked.name} {_LACKS} ({why}). {outdated.ADVICE}")
        guarded_states.unwatch_for_all(optimizer)
        outdated.refuse_state(optimizer, f"the state of {type(optimizer).__name__} {_LACKS} ({why}). {outdated.ADVICE}")

    def refuse_lost(self, why: str) -> None:
        """Refuse reads of parameters whose updates were queued on a device behind sums that never came."""
        lost = self._driver.lost()
        for tracked in self.tracked:
            if tracked.tensor in lost and tracked.phase is not Phase.LOST:
                outdated.refuse_reads(tracked.param, f"{tracked.name} {_LOST} ({why}). {outdated.ADVICE}")

    # -- updates ------------------------------------------------------------------------------------

    def update(self, step: DeferredStep, several: Sequence[Tracked]) -> None:
        began = now_ns()
        tensors = [tracked.tensor for tracked in several]
        params = [tracked.param for tracked in several]
        self._driver.wait_for(tensors)
        self._finite.updates(tensors)
        with guarded_params.as_ordinary():
            # what stands there: the wrapper, or what the script has put there since step()
            before = [guarded_params.get_gradient(param) for param in params]
            for tracked in several:
                guarded_params.set_gradient(tracked.param, tracked.slot)
            try:
                with as_at_step():
                    if self._verifier.verifies:
                        for tracked in several:
                            self._verifier.arrived(tracked.param, tracked.slot)
                            self._verifier.changes(tracked.param, tracked.later)
                    self._gradients.change(several)
                    try:
                        step.update(params)
                    except Exception as error:
                        self._fail_half_made(step, several, error)
                    if self._verifier.verifies:
                        self._verifier.updated(params)
            finally:
                for param, gradient in zip(params, before, strict=True):
                    guarded_params.set_gradient(param, gradient)
        self._recorder.add_each("update", self._driver.iteration, tensors, began, now_ns())

    def _fail_half_made(self, step: DeferredStep, several: Sequence[Tracked], error: Exception) -> NoReturn:
        """End the job, since `step` has raised `error`: to try again would make those updates twice that it has made."""
        kind, names = type(step.optimizer).__name__, ", ".join(tracked.name for tracked in several)
        self._driver.fail(
            f"{kind}.step() raised {described(error)}; this was after step() had returned, in updates that it had "
            f"left until gradients are summed ({names}). Some of these may have been made. {_RAISES_AT_ONCE}",
            because_of=error,
        )

    def has_raised(self, step: DeferredStep) -> None:
        if step.may_be_half_done:
            self._half_done = type(step.optimizer).__name__

    def refuse_to_go_on(self) -> None:
        """The script trains on: end the job if a step is half done. Until then it may read and save what there is."""
        if self._half_done is not None:
            self._driver.fail(
                f"{self._half_done}.step() raised an error when some of its updates were left until gradients are summed, and "
                f"the script trains on; under DDP other parameters would have been updated. {_RAISES_AT_ONCE}"
            )

    # -- a device's streams -------------------------------------------------------------------------

    def step_ran(self) -> None:
        """An optimizer has stepped, on the stream that is current now."""
        if self._driver.streams is not None:
            self.home = self._driver.streams.scripts()

    def note_use(self) -> None:
        """A parameter is used, for the first time in this iteration."""
        if self.is_elsewhere:
            self.were_used_elsewhere = True

    @property
    def is_elsewhere(self) -> bool:
        """Whether the script is on another stream than the home stream."""
        streams = self._driver.streams
        return self.home is not None and streams is not None and streams.scripts() != self.home

    def from_elsewhere(self, makes_updates: Callable[[], None]) -> None:
        if self.is_elsewhere:
            self.were_used_elsewhere = True
            self.make_at_home(makes_updates)

    def make_at_home(self, makes_updates: Callable[[], None]) -> None:
        """Call `makes_updates` on the home stream, and let the host wait for it.

        The streams on which the script uses parameters wait for `step()`, and no more can be told to them.
        """
        assert self.home is not None
        self.home.run(makes_updates).synchronize()
