"""Packed weights as floats again, whole and by rows; and columns that do not depend on their company."""

import pytest
import torch

from gsa.errors import GSAError
from gsa.ops.linear import matvec, pack
from gsa.ops.weights import BITS, FORMATS
from tests.ops.isas import ISAS, needs_native, used

WAYS = [*((format, "fp32") for format in FORMATS), *((format, "int8") for format in BITS)]
SHAPES = [(1, 1), (16, 32), (50, 70), (33, 576)]


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_native_unpacks_what_torch_does(isa: str, shape: tuple[int, int], format: str) -> None:
    packed = pack(torch.randn(shape), format)
    room = torch.empty(shape[0] * shape[1] + 5)
    with used(isa):
        assert torch.equal(packed.unpack(), packed._unpack())
        assert torch.equal(packed.unpack(room), packed._unpack())


@pytest.mark.parametrize("group", [32, 64, None])
def test_unpacks_groups(group: int | None) -> None:
    weight = torch.randn(20, 100)
    packed = pack(weight, "int8", group)
    assert torch.equal(packed.unpack(), packed._unpack())
    assert float((packed.unpack() - weight).norm() / weight.norm()) < 0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_rows(shape: tuple[int, int], format: str) -> None:
    packed = pack(torch.randn(shape), format)
    indices = torch.randint(shape[0], (2, 3))
    assert torch.equal(packed.rows(indices), packed._unpack()[indices])


def test_rows_of_wide_groups() -> None:
    packed = pack(torch.randn(20, 100), "int8", None)
    assert torch.equal(packed.rows(torch.tensor([3, 19])), packed._unpack()[[3, 19]])


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(3),
        torch.empty(10, 40),
        torch.empty(400, dtype=torch.float64),
        torch.empty(800)[::2],
        torch.empty(1).expand(400),
        torch.empty(400, device="meta"),
    ],
)
def test_room_that_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(GSAError, match=r"unpack: out is .* expected contiguous torch.float32 \[400\] on cpu"):
        pack(torch.randn(10, 40), "bf16").unpack(out)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "activations"), WAYS)
def test_a_column_does_not_depend_on_its_company(isa: str, format: str, activations: str) -> None:
    packed, x = pack(torch.randn(45, 200), format), torch.randn(16, 200)
    with used(isa):
        alone = torch.stack([matvec(packed, column, activations=activations) for column in x])
        for count in range(1, 17):
            assert torch.equal(matvec(packed, x[:count], activations=activations), alone[:count])
