"""How many examples hypothesis tries of a property: a fifth in `make test`, but at least five."""

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "derandomize": True, "database": None, "print_blob": True}
SHARE = 5


def register_profiles() -> None:
    """`quick`, which is used unless pytest is called with `--hypothesis-profile`; `wide`; and `fuzz`, with fresh seeds.

    The first two always try the same examples.
    """
    settings.register_profile("wide", max_examples=100, **COMMON)
    # How long examples take is the machine's affair: a busy one is no failure.
    fresh = {**COMMON, "derandomize": False, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("fuzz", max_examples=100, **fresh)
    settings.register_profile("quick", max_examples=100 // SHARE, **COMMON)
    settings.load_profile("quick")


def examples(count: int) -> settings:
    """Settings of a test with this many examples in `make test-all`, and in each turn of `make fuzz`."""
    quick = settings.get_current_profile_name() == "quick"
    return settings(max_examples=min(count, max(count // SHARE, 5)) if quick else count)
