"""How many examples hypothesis tries of a property: a quarter in `make test`, but at least five."""

from hypothesis import settings

COMMON = {"deadline": None, "derandomize": True, "database": None, "print_blob": True}
SHARE = 4


def register_profiles() -> None:
    """`quick`, which is used unless pytest is called with `--hypothesis-profile wide`, and `wide`."""
    settings.register_profile("wide", max_examples=100, **COMMON)
    settings.register_profile("quick", max_examples=100 // SHARE, **COMMON)
    settings.load_profile("quick")


def examples(count: int) -> settings:
    """Settings of a test with this many examples in `make test-all`."""
    wide = settings.get_current_profile_name() == "wide"
    return settings(max_examples=count if wide else min(count, max(count // SHARE, 5)))
