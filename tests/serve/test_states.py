"""States as resources: made, told, fetched, brought back, removed; and what cannot be one."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.infer import State
from gsa.infer.text_model import load
from gsa.serve.store import Conversation, StateStore
from tests.examples import examples
from tests.serve.live import Live, events, served
from tests.serve.test_complaints import cached, text

FILE = {"Content-Type": "application/octet-stream"}


def test_a_state_from_making_to_removing(server: Live) -> None:
    made = server.post("/v1/states", {"text": "Once upon a time", "name": "tale"}, 201)
    facts = server.http.get(f"/v1/states/{made['id']}").json()
    assert {**facts, "cached_tokens": made["cached_tokens"]} == made
    assert (facts["tokens"], facts["model"], facts["name"]) == (16, "talks", "tale")
    assert facts in server.http.get("/v1/states").json()["data"]
    content = server.http.get(f"/v1/states/{made['id']}/content").content
    uploaded = server.http.post("/v1/states?name=again", content=content, headers=FILE)
    assert uploaded.status_code == 201
    assert (uploaded.json()["tokens"], uploaded.json()["bytes"]) == (facts["tokens"], facts["bytes"])
    answers = [server.complete(" there", state=id_) for id_ in (made["id"], made["id"], uploaded.json()["id"])]
    assert {text(answer) for answer in answers} == {text(server.complete("Once upon a time there"))}
    assert server.http.delete(f"/v1/states/{made['id']}").json()["deleted"]
    assert server.complete("a", 404, state=made["id"])["error"]["code"] == "state_not_found"
    assert server.http.get(f"/v1/states/{made['id']}").status_code == 404


def test_three_ways_to_the_same_state(server: Live) -> None:
    by_ids = server.post("/v1/states", {"ids": list(b"Once upon")}, 201)
    by_parts = server.post("/v1/states", {"text": " upon", "state": by_ids["id"]}, 201)
    assert by_parts["tokens"] == 14
    chat = server.post("/v1/states", {"messages": [{"role": "system", "content": "Be brief."}]}, 201)
    whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"messages": whole, "temperature": 0, "max_tokens": 8}
    expected = server.post("/v1/chat/completions", body)
    answer = server.chat("Hello", state=chat["id"])
    assert text(answer) == text(expected)
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert cached(answer) == chat["tokens"]


def test_a_document_and_a_conversation_about_it(server: Live) -> None:
    document = server.post("/v1/states", {"text": "The moon is made of cheese.\n"}, 201)
    first = server.chat("Of what?", state=document["id"], return_state="id")
    second = server.chat("Sure?", state=first["choices"][0]["state"]["id"], return_state="id")
    assert cached(second) == document["tokens"] + first["usage"]["total_tokens"] - document["tokens"]
    facts = server.http.get(f"/v1/states/{second['choices'][0]['state']['id']}").json()
    assert facts["messages"] == 4


def test_branches_of_one_state_do_not_know_each_other(server: Live) -> None:
    start = server.chat("Hello", return_state="id")["choices"][0]["state"]["id"]
    one, other = (server.chat(said, state=start, return_state="id") for said in ("Left", "Right"))
    again = server.chat("Left", state=start)
    assert text(again) == text(one) != text(other)


def test_progress_of_a_long_document(server: Live) -> None:
    body = {"text": "word " * 1500, "stream": True}
    *told, state, done = events(server.http.post("/v1/states", json=body).text)
    assert done is None
    assert [each["object"] for each in told] == ["state.progress"] * len(told)
    assert told[-1]["read"] == told[-1]["tokens"] == state["tokens"] == 7500
    assert [each["read"] for each in told] == sorted(each["read"] for each in told)


def test_a_state_is_found_with_its_salt_only(server: Live) -> None:
    made = server.post("/v1/states", {"text": "secret", "cache_salt": "mine"}, 201)
    assert server.complete("a", state=made["id"], cache_salt="mine")
    for salt in (None, "", "yours"):
        assert server.complete("a", 404, state=made["id"], cache_salt=salt)["error"]["param"] == "state"
        query = {} if salt is None else {"cache_salt": salt}
        assert server.http.get(f"/v1/states/{made['id']}", params=query).status_code == 404
        assert server.http.delete(f"/v1/states/{made['id']}", params=query).status_code == 404
        listed = server.http.get("/v1/states", params=query).json()["data"]
        assert made["id"] not in [state["id"] for state in listed]
    assert server.http.get(f"/v1/states/{made['id']}", params={"cache_salt": "mine"}).status_code == 200


@examples(40)
@given(st.data())
def test_uploads_are_checked_as_files_are(server: Live, data: st.DataObject) -> None:
    """Any change of any byte is noticed, and so is what is no state at all."""
    content = getattr(test_uploads_are_checked_as_files_are, "content", None)
    if content is None:
        made = server.post("/v1/states", {"text": "a state"}, 201)
        content = server.http.get(f"/v1/states/{made['id']}/content").content
        test_uploads_are_checked_as_files_are.content = content
    kind = data.draw(st.sampled_from(["change", "cut", "other"]))
    if kind == "change":
        place = data.draw(st.integers(0, len(content) - 1))
        changed = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    elif kind == "cut":
        changed = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        changed = data.draw(st.binary(max_size=200))
    answer = server.http.post("/v1/states", content=changed, headers=FILE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_state")


def test_states_of_other_models_and_broken_base64(server: Live, folder: Path) -> None:
    assert "base64" in server.complete("a", 400, state={"base64": "%%%"})["error"]["message"]
    assert server.complete("a", 400, state={"file": "x"})["error"]["param"] == "state"
    with served("gsa-tiny") as other:
        made = other.post("/v1/states", {"text": "from elsewhere"}, 201)
        content = other.http.get(f"/v1/states/{made['id']}/content").content
        # A model without a chat template says so.
        assert other.chat("Hello", status=400)["error"]["code"] == "no_chat_template"
    answer = server.http.post("/v1/states", content=content, headers=FILE)
    assert "another model" in answer.json()["error"]["message"]


def made(server: Live, length: int) -> State:
    return server.serving.texts.engine.read(list(range(1, 1 + length)))


def test_memory_is_bounded_and_the_least_recently_used_go_first(server: Live) -> None:
    state = made(server, 3)
    store = StateStore(server.serving.texts.engine.model, 3 * state.nbytes)
    first, second, third = (store.put(state) for _ in range(3))
    store.load(first)
    store.put(state)
    assert store.find(second.id) is None
    assert {entry.id for entry in store.list()} >= {first.id, third.id}
    assert store.memory == store.stored == 3 * state.nbytes
    with pytest.raises(GSAError, match="is gone"):
        store.load(second)
    with pytest.raises(GSAError, match="all states together may have 1"):
        StateStore(server.serving.texts.engine.model, 1).put(state)


def test_a_folder_is_bounded_checked_and_for_one_process(server: Live, tmp_path: Path) -> None:
    model, state, said = server.serving.texts.engine.model, made(server, 4), list[str]()
    store = StateStore(model, state.nbytes, tmp_path, 2 * state.file_bytes + 1500)
    talk = Conversation([{"role": "user", "content": "\ud800"}], [1, 2], None, True)
    kept = [store.put(state, name=str(i), salt="s", conversation=talk) for i in range(3)]
    assert [entry.name for entry in store.list("s")] == ["1", "2"]
    assert len(list(tmp_path.glob("state_*"))) == 4
    with pytest.raises(GSAError, match="another process"):
        StateStore(model, 1, tmp_path, 1)
    store.close()
    for name, content in {"0" * 32: "{", "1" * 32: '{"id": 3}', "2" * 32: "[]"}.items():
        (tmp_path / f"state_{name}.json").write_text(content)
    facts = json.loads((tmp_path / f"{kept[2].id}.json").read_text())
    facts["conversation"]["messages"] = [{"role": 1}]
    (tmp_path / f"{kept[2].id}.json").write_text(json.dumps(facts))
    file = tmp_path / f"{kept[1].id}.safetensors"
    again = StateStore(model, 10 * state.nbytes, tmp_path, 10 * state.nbytes, said.append)
    assert len(said) == 4
    assert [entry.conversation for entry in again.list("s")] == [talk]
    (entry,) = again.list("s")
    assert again.load(entry).digest == state.digest
    again.close()
    file.write_bytes(file.read_bytes()[:-1])
    broken = StateStore(model, 10 * state.nbytes, tmp_path, 10 * state.nbytes)
    with pytest.raises(GSAError, match="truncated"):
        broken.load(entry)
    broken.close()


WRITER = """
import sys
from pathlib import Path
from gsa.infer.text_model import load
from gsa.serve.store import StateStore
model = load("gsa-tiny")
store, state = StateStore(model.engine.model, 2**30, Path(sys.argv[1]), 2**30), model.read("It was")
while True:
    print(store.put(state).id, flush=True)
"""


@pytest.mark.slow
def test_a_kill_loses_no_state_that_was_acknowledged(tmp_path: Path) -> None:
    model = load("gsa-tiny").engine.model
    acknowledged: list[str] = []
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged += [process.stdout.readline().strip() for _ in range(7)]
        process.kill()
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
        process.stdout.close()
        with closing(StateStore(model, 2**30, tmp_path, 2**30)) as store:
            assert {entry.id for entry in store.list()} >= set(acknowledged)
            assert {store.load(entry).tokens for entry in store.list()} == {2}
        assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.glob("*.json")))


def test_a_conversation_goes_on_where_the_past_is_told_differently(server: Live) -> None:
    """A stop string was read and is not part of the message: all is read again, behind the document it stood behind."""
    document = server.post("/v1/states", {"text": "The moon.\n"}, 201)
    plain = server.chat("Of what?", state=document["id"], max_tokens=30)
    stop = text(plain)[4:6]
    first = server.chat("Of what?", state=document["id"], max_tokens=30, stop=stop, return_state="id")
    assert first["choices"][0]["finish_reason"] == "stop"
    assert stop not in text(first)
    second = server.chat("Sure?", state=first["choices"][0]["state"]["id"])
    whole = server.chat("Of what?", text(first), "Sure?", state=document["id"], cache=False)
    assert text(second) == text(whole)
    assert second["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_instructions_hold_for_one_response(server: Live) -> None:
    ask = {"temperature": 0, "max_output_tokens": 8}

    def said(answer: dict) -> str:
        return answer["output"][0]["content"][0]["text"]

    first = server.post("/v1/responses", {"input": "Hello", "instructions": "Be brief.", **ask})
    told = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said(first)}]
    told.append({"role": "user", "content": "And?"})
    read = first["usage"]["total_tokens"]
    for instructions, reused in (("Be brief.", True), ("Be long.", False), (None, False)):
        body = {"input": "And?", "previous_response_id": first["id"], "instructions": instructions, "cache_salt": None}
        second = server.post("/v1/responses", {**body, **ask})
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        whole = server.post("/v1/chat/completions", {"messages": system + told, "temperature": 0, "max_tokens": 8})
        assert said(second) == text(whole), instructions
        assert (second["usage"]["input_tokens_details"]["cached_tokens"] >= read) == reused
    assert server.http.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert server.post("/v1/responses", {**body, **ask}, 404)["error"]["code"] == "previous_response_not_found"
    unstored = server.post("/v1/responses", {"input": "Hello", "store": False, **ask})
    body["previous_response_id"] = unstored["id"]
    assert server.post("/v1/responses", {**body, **ask}, 404)["error"]["param"] == "previous_response_id"


def test_messages_of_states_and_inline_states_of_chats(server: Live) -> None:
    system, user = {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    one = server.post("/v1/states", {"messages": [system]}, 201)
    two = server.post("/v1/states", {"messages": [user], "state": one["id"]}, 201)
    both = server.post("/v1/states", {"messages": [system, user]}, 201)
    assert (two["tokens"], two["messages"]) == (both["tokens"], both["messages"]) == (two["tokens"], 2)
    asked = server.post(
        "/v1/chat/completions", {"messages": [], "state": both["id"], "temperature": 0, "max_tokens": 8}
    )
    whole = {"messages": [system, user], "temperature": 0, "max_tokens": 8}
    assert text(asked) == text(server.post("/v1/chat/completions", whole))
    assert server.chat(status=400)["error"]["param"] == "messages"
    inline = server.complete("The moon.", return_state="base64")["choices"][0]["state"]["base64"]
    first = server.chat("Hello", state={"base64": inline}, return_state="id")
    second = server.chat("And?", state=first["choices"][0]["state"]["id"])
    assert cached(second) >= first["usage"]["total_tokens"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_not_the_clients_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with served(folder, state_dir=str(tmp_path), cache_mb=0) as live:

        def failing(*given: object) -> None:
            raise OSError(code, "no")

        monkeypatch.setattr("gsa.files.sync", failing)
        for path, body in (
            ("/v1/states", {"text": "a"}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "return_state": "id"}),
            ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ):
            error = live.post(path, body, 503)["error"]
            assert error["code"] == "storage_failed"
            assert str(tmp_path) not in error["message"]
        assert list((tmp_path / "states").glob("state_*")) == []


def test_a_folder_that_cannot_be_written_is_told_at_the_start(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**given: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", failing)
    said: list[str] = []
    StateStore(server.serving.texts.engine.model, 1, tmp_path, 1, said.append).close()
    assert said == [f"serve: {tmp_path} cannot be written (Read-only file system): no state can be kept under an id"]


def test_all_files_of_the_folder_count_and_those_of_others_go_first(server: Live, tmp_path: Path) -> None:
    model, state = server.serving.texts.engine.model, made(server, 4)
    other = load("gsa-tiny")
    store = StateStore(other.engine.model, 1, tmp_path, 2**30)
    foreign = store.put(other.read("It was"))
    store.close()
    with closing(StateStore(model, 1, tmp_path, 2**30)) as store:
        kept = [store.put(state) for _ in range(3)]
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert store.stored == total > foreign.nbytes + 3 * state.nbytes
        assert len(store) == 3
    with closing(StateStore(model, 1, tmp_path, total - 1)) as store:  # at the start already
        assert not list(tmp_path.glob(f"{foreign.id}*"))
        assert {entry.id for entry in store.list()} == {entry.id for entry in kept}
        assert store.stored == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_what_was_used_in_memory_is_known_to_the_next_server(server: Live, tmp_path: Path) -> None:
    model, state = server.serving.texts.engine.model, made(server, 4)
    with closing(StateStore(model, 2**30, tmp_path, 2**30)) as store:
        first, second = (store.put(state) for _ in range(2))
        for age, entry in ((200, first), (100, second)):
            os.utime(tmp_path / f"{entry.id}.json", (time.time() - age,) * 2)
        store.load(first)
        total = store.stored
    with closing(StateStore(model, 2**30, tmp_path, total - 1)) as store:
        assert [entry.id for entry in store.list()] == [first.id]


def test_a_state_that_cannot_be_removed_stays(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder, state_dir=str(tmp_path), cache_mb=0) as live:
        id_ = live.post("/v1/states", {"text": "a"}, 201)["id"]

        def failing(*given: object, **named: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", failing)
            answer = live.http.delete(f"/v1/states/{id_}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
        assert live.http.get(f"/v1/states/{id_}").status_code == 200
        assert live.http.delete(f"/v1/states/{id_}").status_code == 200


def test_nobody_else_reads_what_was_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old" / "states").mkdir(parents=True, mode=0o755)
    for name in ("old", "new"):
        with served(folder, state_dir=str(tmp_path / name)):
            for part in ("states", "cache"):
                assert (tmp_path / name / part).stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_salt_and_name_may_stand_in_the_address_of_a_body_too(server: Live) -> None:
    made = server.post("/v1/states?cache_salt=me&name=mine", {"text": "a"}, 201)
    assert made["name"] == "mine"
    assert server.http.get(f"/v1/states/{made['id']}").status_code == 404
    assert server.http.get(f"/v1/states/{made['id']}?cache_salt=me").status_code == 200
    error = server.post("/v1/states?cache_salt=me", {"text": "a", "cache_salt": "you"}, 400)["error"]
    assert error["param"] == "cache_salt"
