"""A forked child computes what its parent did, with as many threads, and never waits for threads that are gone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch's threads are those of GNU's OpenMP there")


def _run(code: str) -> None:
    """In a process of its own, since what it tests is a hang."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_a_child_does_what_its_parent_did() -> None:
    """Reads a long prompt, generates, and trains: with torch's threads, those of MKL, and the engine's."""
    _run("""
import os, signal, torch
from gsa import LM, ModelConfig
from gsa.infer.engine import Engine
from gsa.infer.model import Model
from gsa.infer.sampling import Sampling

torch.set_num_threads(2)
model = Model.load("gsa-tiny")
prompt = [7 * i * i % model.vocab_size for i in range(2000)]
lm = LM(ModelConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_slots=32, vocab_size=512))
ids = torch.randint(512, (2, 200))

def large():
    torch.randn(3_000_000).exp().sum()

def work():
    tokens = Engine(model).generate(prompt, Sampling(temperature=0.0, max_tokens=10)).tokens
    lm.zero_grad()
    loss = lm(ids, labels=ids).loss
    loss.backward()
    large()
    return tokens, loss.item(), [x.grad.sum().item() for x in lm.parameters()]

before = work()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that hangs
    same = work() == before and torch.get_num_threads() == 2
    grandchild = os.fork()
    if grandchild == 0:
        signal.alarm(60)
        large()
        os._exit(0)
    os._exit(0 if same and os.waitpid(grandchild, 0)[1] == 0 else 1)
status = os.waitpid(child, 0)[1]
assert status == 0, status
large()
""")


def test_a_child_that_imports_gsa_after_its_fork_may_fork_again() -> None:
    """There, torch's library still believes in the threads of the parent, and would wait for their end."""
    _run("""
import os, signal, threading, time, torch

torch.set_num_threads(2)
torch.randn(3_000_000).exp()  # starts torch's threads
child = os.fork()
if child == 0:
    signal.alarm(60)
    import gsa.ops
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    grandchild = os.fork()
    os._exit(0 if grandchild == 0 or os.waitpid(grandchild, 0)[1] == 0 else 1)
status = os.waitpid(child, 0)[1]
assert status == 0, status
""")
