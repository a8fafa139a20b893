"""Test `nbkit mcp`: a client without a model does 20 tasks on real ranks; misuse is refused and logged.

The 20 tasks are marked `long`. Every run tests the protocol and misuse in this process, and one server with two ranks
and a second client.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_client import AgentClient
from clusters import home_of_clusters
from forked_parents import forked_parents_of_programs
from training_cell import NETWORK

from nbkit.commands import main
from nbkit.errors import NbkitError
from nbkit.notebook.agent_server import (
    LONGEST_ANSWER,
    LONGEST_LINE,
    MOST_CALLS,
    VERSIONS,
    AgentServer,
    AuditLog,
    shortened,
    tool,
    tools_of,
)
from nbkit.notebook.agent_tools import AgentTools
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.registry import ClusterEntry, Process


class SomeTools:
    """Tools without a cluster."""

    def __init__(self) -> None:
        self.held = threading.Event()

    @tool("look", text="to repeat", times="how often")
    def echo(self, text: str, times: int = 1) -> Any:
        """Repeat a text."""
        return {"said": text * times}

    @tool("look")
    def hold(self) -> Any:
        """Wait."""
        self.held.wait(20)
        return {}

    @tool("steer", rate="a number", names="words")
    def turn(self, rate: float, names: list[str] | None = None) -> Any:
        """Turn."""
        return {"rate": rate, "names": names}

    @tool("code")
    def fail(self) -> Any:
        """Fail."""
        raise RuntimeError("by itself")


def served(
    home: Path, *messages: Any, allow: str = "look", tools: object | None = None
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Serve the messages (JSON, or bytes as they are). Return id -> answer, and the lines of the log."""
    lines = b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in messages)
    out, log = io.BytesIO(), AuditLog(home / "mcp.jsonl")
    AgentServer(tools_of(tools or SomeTools()), allow, log, out).serve(io.BytesIO(lines))
    answers = {answer["id"]: answer for answer in map(json.loads, out.getvalue().splitlines())}
    return answers, [json.loads(line) for line in log.path.read_text().splitlines()]


def calling(name: Any, id: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


def asking(method: str, id: int = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["error"]["message"] if "error" in answer else answer["result"]["content"][0]["text"])


# The protocol ---------------------------------------------------------------------------------------------------------


def test_the_handshake_has_the_version_the_server_name_and_the_granted_tiers(tmp_path: Path) -> None:
    client = {"name": "editor", "version": "3"}
    answers, log = served(
        tmp_path,
        asking("initialize", 1, protocolVersion="2025-03-26", capabilities={}, clientInfo=client),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        asking("initialize", 2, protocolVersion="1999-01-01"),
        asking("ping", 3),
        {"jsonrpc": "2.0", "id": 9, "result": {}},
        allow="steer",
    )

    hello = answers[1]["result"]
    assert (hello["protocolVersion"], hello["serverInfo"]["name"]) == ("2025-03-26", "nbkit")
    assert hello["capabilities"] == {"tools": {"listChanged": False}}
    assert "granted: look, steer" in hello["instructions"] and "--allow code" in hello["instructions"]
    assert answers[2]["result"]["protocolVersion"] == VERSIONS[0]
    assert answers[3]["result"] == {} and len(answers) == 3
    assert [(line["method"], line["outcome"], line["allow"]) for line in log] == [
        ("initialize", "done", "steer"),
        ("initialize", "done", "steer"),
        ("ping", "done", "steer"),
    ]
    assert log[0]["client"] == "editor"


def test_the_list_has_only_the_granted_tools_with_their_schemas(tmp_path: Path) -> None:
    listed = {allow: served(tmp_path, asking("tools/list"), allow=allow)[0][1]["result"]["tools"]
              for allow in ("look", "steer", "code")}  # fmt: skip

    assert [each["name"] for each in listed["look"]] == ["echo", "hold"]
    assert [each["name"] for each in listed["code"]] == ["echo", "hold", "turn", "fail"]
    assert listed["look"][0] == {
        "name": "echo",
        "description": "Repeat a text.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "to repeat"},
                "times": {"type": "integer", "default": 1, "description": "how often"},
            },
            "required": ["text"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    }
    names = listed["steer"][2]["inputSchema"]["properties"]["names"]
    assert names == {"type": "array", "items": {"type": "string"}, "description": "words"}


def test_a_call_returns_its_result_as_text_and_as_an_object_and_is_logged_twice(tmp_path: Path) -> None:
    answers, log = served(tmp_path, calling("echo", 7, text="ä", times=2))

    result = answers[7]["result"]
    assert result["structuredContent"] == {"said": "ää"} == json.loads(result["content"][0]["text"])
    assert not result["isError"]
    assert [line["outcome"] for line in log] == ["asked", "done"]
    assert log[0]["arguments"] == {"text": "ä", "times": 2} and log[1]["seconds"] >= 0


def test_every_tool_of_a_cluster_describes_itself_and_its_arguments() -> None:
    tools = tools_of(AgentTools())

    assert {each.tier for each in tools.values()} == {"look", "steer", "code"}
    for each in tools.values():
        assert len(each.about) > 20 and each.described["inputSchema"]["type"] == "object"
        assert all(parameter.about for parameter in each.parameters.values())
    assert len(json.dumps([each.described for each in tools.values()])) < 16_000  # because each model has to read them


def test_a_long_answer_is_cut_in_the_middle_with_a_note() -> None:
    value = {"text": "a" * 100_000 + "END", "rows": list(range(50_000)), "few": 1}

    short = shortened(value)

    assert len(json.dumps(short)) <= LONGEST_ANSWER
    assert short["text"].endswith("END") and "left out" in short["text"]
    assert short["rows"][0] == 0 and short["rows"][-1] == 49_999 and short["few"] == 1
    assert shortened({"text": "short"}) == {"text": "short"}


# Misuse ---------------------------------------------------------------------------------------------------------------

MISUSE: dict[str, tuple[Any, str]] = {
    "a tier that was not granted": (calling("turn", rate=1.0), "nbkit mcp --allow steer"),
    "the highest tier": (calling("fail"), "nbkit mcp --allow code"),
    "an unknown tool": (calling("format_disk"), "There is no tool 'format_disk'. There are: echo, hold."),
    "a tool that is no name": (calling(["echo"]), "There is no tool"),
    "an unknown argument": (calling("echo", text="a", sudo=True), "echo has no argument 'sudo'"),
    "a missing argument": (calling("echo"), "echo needs the argument 'text'"),
    "an argument of another type": (calling("echo", text="a", times="many"), '"many" is no integer'),
    "a truth for a number": (calling("echo", text="a", times=True), "true is no integer"),
    "arguments that are a list": (
        asking("tools/call", name="echo", arguments=["a"]),
        "The arguments of a tool are an object",
    ),
    "an unknown method": (asking("resources/read", uri="file:///etc/passwd"), "There is no method 'resources/read'"),
    "a line that is not JSON": (b"rm -rf /", "This line is not JSON"),
    "a batch": (b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', "Each line must be one JSON object"),
    "a message of another protocol": ({"id": 1, "method": "ping"}, "Each line must be one JSON object"),
    "a line without end": (b"x" * (LONGEST_LINE + 9), "at most 1,048,576 bytes"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_and_logged(name: str, tmp_path: Path) -> None:
    message, why = MISUSE[name]

    answers, log = served(tmp_path, message, calling("echo", 2, text="goes on"))

    refused = answers[1 if 1 in answers else None]
    assert why in text_of(refused) and ("error" in refused or refused["result"]["isError"])
    assert log[0]["outcome"] == "refused" and why in log[0]["why"]
    assert answers[2]["result"]["structuredContent"] == {"said": "goes on"}


def test_the_ninth_call_at_the_same_time_is_refused(tmp_path: Path) -> None:
    tools = SomeTools()
    threading.Timer(1.0, tools.held.set).start()

    answers, log = served(tmp_path, *(calling("hold", id) for id in range(MOST_CALLS + 1)), tools=tools)

    assert "8 calls are running already" in text_of(answers[MOST_CALLS])
    assert [line["outcome"] for line in log].count("refused") == 1


def test_an_error_in_a_tool_becomes_a_result_and_is_logged(tmp_path: Path) -> None:
    answers, log = served(tmp_path, calling("fail"), allow="code")

    assert answers[1]["result"]["isError"] and "RuntimeError: by itself" in text_of(answers[1])
    assert (log[1]["outcome"], log[1]["why"]) == ("failed", "RuntimeError: by itself")


def test_only_its_user_can_read_the_log_and_it_is_only_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "mcp.jsonl"
    path.write_text("{}\n")
    path.chmod(0o644)

    served(tmp_path, asking("ping"))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().splitlines()) == 2


def test_without_a_log_the_server_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))
    (tmp_path / "mcp.jsonl").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(NbkitError, match="cannot be written"):
        AuditLog(tmp_path / "mcp.jsonl")
    monkeypatch.chdir(tmp_path)
    assert main(["mcp"]) == 1
    assert "no request is served" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_a_request_that_cannot_be_logged_is_not_run(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "mcp.jsonl")
    os.dup2(os.open("/dev/full", os.O_WRONLY), log._file)
    out = io.BytesIO()

    AgentServer(tools_of(SomeTools()), "look", log, out).serve(
        io.BytesIO(json.dumps(calling("echo", text="a")).encode())
    )

    assert "no request is served" in text_of(json.loads(out.getvalue()))


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterEntry]:
    """Return a function that registers a cluster whose only process is this one."""
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))

    def make(name: str, kernel: Process | None = None) -> ClusterEntry:
        here = Process.of(os.getpid())
        made = ClusterEntry(
            name=name, host=socket.gethostname(), n=1, backend="gloo", ttl=60.0, born=time.time(), controller=here,
            parent=here, kernel=kernel or here, labels=("core 0",), reasons=("",), ranks=(here,),
        )  # fmt: skip
        made.folder.mkdir()
        registry.save(made)
        return made

    return make


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_cluster_of_another_user_is_refused(entry: Callable[..., ClusterEntry], tmp_path: Path) -> None:
    os.chown(entry("theirs").folder, 65534, 65534)

    for name in ("status", "why", "stop", "run_cell", "stop_cluster"):
        arguments = {"cluster": "theirs", **({"code": "1"} if name == "run_cell" else {})}
        answers, log = served(tmp_path, calling(name, **arguments), allow="code", tools=AgentTools())
        assert "belongs to another user" in text_of(answers[1])
        assert log[-1]["outcome"] == "failed" and log[-2]["arguments"] == arguments


def test_a_path_outside_the_folder_of_clusters_is_refused_as_a_name(
    entry: Callable[..., ClusterEntry], tmp_path: Path
) -> None:
    entry("one")
    for name in ("../one", "/etc", "one/../one"):
        answers, _ = served(tmp_path, calling("status", cluster=name), tools=AgentTools())
        assert "There is no cluster called" in text_of(answers[1]) and "list_clusters" in text_of(answers[1])


def test_a_tool_without_a_cluster_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path))

    answers, _ = served(tmp_path, calling("progress"), calling("list_clusters", 2), tools=AgentTools())

    assert "start_cluster" in text_of(answers[1])
    assert answers[2]["result"]["structuredContent"] == {"clusters": [], "unreadable": []}


# Real ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def before(tmp_path: Path) -> Iterator[str]:
    with home_of_clusters(tmp_path), forked_parents_of_programs() as source:
        yield source


def test_two_clients_share_one_cluster(before: str, tmp_path: Path) -> None:
    """Check that the first runs cells, and the second finds the hang and is refused what the user did not grant."""
    with AgentClient(tmp_path, "code", before=before) as first, AgentClient(tmp_path, "steer") as second:
        started = first.call("start_cluster", ranks=2, cpu=True, name="shared", ttl=60)
        assert [rank["state"] for rank in started["ranks"]] == ["idle", "idle"]
        cell = first.call("run_cell", code="print('on stdout'); rank * 10")
        assert (cell["status"], cell["values"]) == ("ok", {"0": 0, "1": 10})
        assert cell["shown"].startswith("[0-1] on stdout\n") and "\x1b" not in cell["shown"]
        assert second.call("list_clusters")["clusters"][0]["state"] == "attached"
        assert "nbkit mcp --allow code" in second.refused("run_cell", code="1")

        first.call("start_cell", code="import time\nif rank == 1: time.sleep(600)\ndist.barrier()")
        deadline = time.monotonic() + 60
        while not (why := second.call("why", cluster="shared"))["stuck"] and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "rank 1 is in time.sleep, cell 2 line 2" in why["sentence"]
        assert "uses the cluster 'shared'" in second.refused("stop", cluster="shared")
        assert first.call("stop")["status"] == "interrupted"

        flood = first.call("run_cell", code="print('y' * 3_000_000); 'z' * 500_000", timeout=60.0)
        assert flood["status"] == "ok" and len(json.dumps(flood)) <= LONGEST_ANSWER
        slow = first.call("run_cell", code="import time; time.sleep(600)", timeout=0.5)
        assert slow["status"] == "interrupted" and "time.sleep" in slow["timeout"]
        begun = first.begin("tools/call", {"name": "run_cell", "arguments": {"code": "time.sleep(600)"}})
        first.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": begun}})
        assert first.answer(begun)["result"]["structuredContent"]["status"] == "interrupted"
        assert first.call("stop_cluster") == {"stopped": "shared", "ranks": 2}
        assert second.call("list_clusters")["clusters"] == []
    outcomes = [(line["tool"], line["outcome"]) for line in first.log if line["outcome"] not in ("asked", "done")]
    assert outcomes == [("run_cell", "refused"), ("stop", "failed")]


TRAINER = f"""{NETWORK}
lagging = {{}}

def mse(output, target):
    time.sleep(lagging.get(rank, 0))
    return F.mse_loss(output, target)

trainer = make(loss=mse, log_dir="runs")
"""


def until(ask: Callable[[], Any], good: Callable[[Any], Any], seconds: float = 90.0) -> Any:
    """Call `ask` until its answer is good; return that answer."""
    deadline = time.monotonic() + seconds
    while not good(answer := ask()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.5)
    return answer


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_client_without_a_model_does_20_tasks(before: str, tmp_path: Path) -> None:
    with AgentClient(tmp_path, "code", before=before) as agent:
        # 1-3: start a cluster, find it, look at its ranks
        agent.call("start_cluster", ranks=4, cpu=True, name="agents", ttl=120)
        assert [one["ranks"] for one in agent.call("list_clusters")["clusters"]] == [4]
        assert [rank["state"] for rank in agent.call("status")["ranks"]] == ["idle"] * 4
        # 4-5: run a cell; read which rank failed, and in which line
        total = agent.call("run_cell", code="x = torch.ones(1) * rank\ndist.all_reduce(x)\nx.item()")
        assert total["values"] == dict.fromkeys("0123", 6.0)
        failed = agent.call("run_cell", code="y = 1\nif rank == 2: y / 0")
        assert "Rank 2 failed: ZeroDivisionError" in failed["error"] and "line 2" in failed["error"]
        # 6: choose a strategy for other hardware
        planned = agent.call("plan", batch=256, on="4 x 8 H100", layers=24, width=2048, heads=16, rows=2)
        assert planned["devices"] == 32 and planned["rows"][0]["peak"]["parameters"] > 0
        # 7-8: start a training and follow it
        agent.call("run_cell", code=TRAINER, timeout=120.0)
        assert agent.call("start_cell", code="trainer.fit(100_000)")["status"] == "running"
        told = until(lambda: agent.call("progress", points=3), lambda told: told["now"].get("step", 0) > 20)
        assert told["training"] and len(told["points"]) == 3
        assert told["points"][0]["loss"] > told["points"][-1]["loss"] > 0
        # 9-12: what strategies cost; measure two; switch to one; go back
        table = agent.call("strategies")
        assert table["strategy"] == "dp=4" and {"dp=4 zero=3", "tp=4"} <= {row["strategy"] for row in table["rows"]}
        assert "cp=4" in table["unfit"]
        assert agent.call("estimate", strategy="zero3")["memory"]["after"] < table["rows"][0]["memory"]["now"]
        measured = agent.call("compare", strategies=["zero3", "tp"], steps=5)
        assert [row["strategy"] for row in measured["result"]["strategies"] if row["step_s"]][1:] == [
            "dp=4 zero=3",
            "tp=4",
        ]
        switched = agent.call("switch", strategy="zero3")
        assert switched["strategy"] == "dp=4 zero=3" and switched["result"]["identical"]
        assert agent.call("undo")["strategy"] == "dp=4"
        # 13: change the learning rate
        assert agent.call("set_lr", rate=0.004)["result"] == {"old": 0.01, "new": 0.004}
        assert agent.call("run_cell", code="trainer.lr", at_step=True)["values"] == dict.fromkeys("0123", 0.004)
        # 14: find a planted straggler, and remove it
        agent.call("run_cell", code="lagging[2] = 0.2", at_step=True)
        said = "The others wait for rank 2"
        assert until(lambda: agent.call("breakdown"), lambda found: said in found["reading"])["late"]["rank"] == 2
        agent.call("run_cell", code="lagging.clear()", at_step=True)
        # 15: memory, rank by rank
        assert [rank["rank"] for rank in agent.call("memory")["ranks"]] == [0, 1, 2, 3]
        # 16: pause the training; it makes no step; resume it
        held = agent.call("pause")["step"]
        time.sleep(1.0)
        assert agent.call("progress", points=1)["now"]["step"] == held
        agent.call("resume")
        until(lambda: agent.call("progress", points=1), lambda told: told["now"]["step"] > held)
        # 17: save
        assert Path(agent.call("save")["result"]["path"]).is_dir()
        # 18: a rank is killed, and the training goes on with another process
        killed = agent.call("status")["ranks"][3]["pid"]
        os.kill(killed, signal.SIGKILL)
        seen = until(lambda: agent.call("events"), lambda seen: "replaced" in [one["kind"] for one in seen["events"]])
        assert [(end["rank"], end["how"], end["pid"]) for end in seen["ranks_ended"]] == [(3, "SIGKILL", killed)]
        assert [one["kind"] for one in seen["events"]].count("switch") == 2
        step = agent.call("progress", points=1)["now"]["step"]
        until(lambda: agent.call("progress", points=1), lambda told: told["now"]["step"] > step)
        assert "was replaced" in agent.call("cell_output")["shown"]
        # 19: stop it; find a hang, and free it; the next cell works
        assert agent.call("stop")["status"] == "interrupted"
        agent.call("start_cell", code="y = torch.ones(4)\nif rank != 1: dist.all_reduce(y)\ndist.all_reduce(y)")
        why = until(lambda: agent.call("why"), lambda why: why["stuck"])
        assert "Rank 1 has left out all_reduce" in why["sentence"] and why["ranks"] == [1]
        assert agent.call("stop")["status"] == "interrupted"
        assert agent.call("run_cell", code="trainer.step > 0", timeout=60.0)["values"] == dict.fromkeys("0123", True)
        # 20: a script for torchrun, and the end
        exported = agent.call("export_script", path="train.py")
        compile(Path(exported["files"][0]).read_text(), "train.py", "exec")
        assert exported["run"] == "torchrun --nproc-per-node 4 train.py"
        Path(tmp_path / "mine.py").write_text("my = 1\n")
        assert "nbkit has not written it" in agent.refused("export_script", path="mine.py")
        agent.call("stop_cluster")
        assert agent.call("list_clusters")["clusters"] == []
    assert all(line["client"] == "test" for line in agent.log)
    assert len([line for line in agent.log if line["outcome"] == "failed"]) == 1


def test_the_page_for_agents_lists_every_tool_with_its_tier() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([a-z_, ]+) \|$", page, re.MULTILINE)

    listed = {name: tier for tier, names in rows for name in names.split(", ")}

    assert listed == {name: each.tier for name, each in tools_of(AgentTools()).items()}
    assert len(page.split()) <= 500
