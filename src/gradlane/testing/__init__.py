"""What a policy, a search, a fabric or a backend promises, as checks for one of your own.

    from gradlane.testing.policies import check_policy

    def test_my_policy() -> None:
        check_policy(MyPolicy())

- `policies.check_policy`: a policy (`gradlane.core.policy.Policy`).
- `searches.check_search`: a search over knobs (`gradlane.planning.search.Search`).
- `fabrics.check_fabric`: a simulated network (`gradlane.sim.fabric.Fabric`).
- `backends.check_backend`: what carries messages in a live run
  (`gradlane.live.backends.base.Backend`). It needs torch.
- `streams.CheckedStreams`: a device's streams on the CPU, which find uses of memory that nothing
  orders. They need torch.
- `generators`: hypothesis strategies for profiles, networks, clusters, plans and jobs.
- `logs`: the logs of simulated Dispatchers, to be replayed.
- `oracles`: formulas and algorithms of the papers, to hold simulated times against.

A check returns None, or raises `AssertionError` with the promise that was broken. Examples are
drawn with hypothesis, under the hypothesis profile that the caller has loaded, and the smallest
example that breaks a promise is shown.

Importing this package without hypothesis raises `ImportError` with what to install.
"""

try:
    import hypothesis as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"gradlane.testing needs hypothesis, which cannot be imported ({error}); install it with: "
        "pip install 'gradlane[testing]'"
    ) from error
