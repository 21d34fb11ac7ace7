from own_policy import EqualParts

from gradlane.testing.policies import check_policy


def test_equal_parts() -> None:
    check_policy(EqualParts())
