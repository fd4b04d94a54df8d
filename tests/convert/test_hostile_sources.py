"""A config.json of any content ends at once, in a Transformer that can be represented or in a sentence."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gsa.convert import STUDENTS, Choices
from gsa.convert.students import student_config
from gsa.convert.teacher import _NEUTRAL, FAMILIES, read_teacher
from tests.examples import examples
from tests.hostile import ended, values

FIELDS: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "sliding_window": None,
}
NAMES = [
    *FIELDS,
    *_NEUTRAL,
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "eos_token_id",
]
contents = st.dictionaries(st.sampled_from(["rope_type", "type", "rope_theta", "factor", "x"]), values, max_size=2)


@examples(300)
@given(
    st.sampled_from(list(FAMILIES)),
    st.dictionaries(
        st.sampled_from([*NAMES, "tie_word_embeddings", "use_sliding_window", "x"]), values | contents, max_size=3
    ),
)
@example("llama", {"rope_parameters": {"rope_theta": float("nan")}})
@example("llama", {"rope_parameters": {"rope_theta": 10**400}})
@example("qwen2", {"use_sliding_window": True, "layer_types": [[], {}, "full_attention"]})
@example("llama", {"architectures": [[]]})
@example("llama", {"hidden_act": {}})
def test_a_config_of_any_values(family: str, given_values: dict[str, Any]) -> None:
    teacher = ended(read_teacher, {"model_type": family, **FIELDS, **given_values})
    if teacher is not None:
        assert len(teacher.windows) == teacher.config.num_hidden_layers
        for to in STUDENTS:
            ended(student_config, teacher, Choices(to=to))
