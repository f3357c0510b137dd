"""The scripts that operate a run take either folder of an emitted run."""

import json
import re
import shlex
import socket
from pathlib import Path

import pytest
from forks import run_scripts

from jaxdt.cli import run_inputs
from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.run_folder import launch_flags
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity import credential as credentials
from jaxdt.runtime.identity.certificate import TOKEN, Holder
from jaxdt.runtime.identity.issuer import ISSUED
from jaxdt.runtime.run_dir import shared, write_config_and_plan
from jaxdt.runtime.storage.checkpoint import about_run, mark_complete
from jaxdt.runtime.storage.durable import FileStore

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RESUMED = "--resume_from=two/run_dir/checkpoints/00000060"
COMMANDS = (
    ("tools/credential.py", "list"),
    ("tools/credential.py", "token", "--out={name}.token"),
    ("tools/credential.py", "token"),
    ("fleet.py", "status"),
)


@pytest.fixture
def job(tmp_path):
    authority.create_run(tmp_path / "two" / "credentials")
    (tmp_path / "two" / "coordinator.flags").touch()
    return tmp_path / "two"


def answers(cwd, *folders):
    commands = [
        (str(SCRIPTS / script), *(word.format(name=Path(folder).name) for word in words), f"--run_dir={folder}")
        for folder in folders
        for script, *words in COMMANDS
    ]
    found = run_scripts(commands, cwd)
    return [found[i : i + len(COMMANDS)] for i in range(0, len(found), len(COMMANDS))]


def test_either_folder_of_an_emitted_run_names_the_run(job):
    issued = {"peer": 1, "issued": "2026-01-02 03:04:05 UTC", "token": "0123456789abcdef"}
    FileStore(job / "run_dir" / "coordinator").put(ISSUED, [issued])
    with socket.socket() as reserved:  # bound, so that no other process gets the port
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        (job / "run_dir" / "coordinator_address").write_text(address)
        of_job, of_run_dir = answers(job.parent, "two", "two/run_dir")
    names = []
    for name, (listed, made, named, status) in {"two": of_job, "run_dir": of_run_dir}.items():
        assert listed[:2] == [0, "peer 1        valid    issued 2026-01-02 03:04:05 UTC  token 0123456789abcdef\n"]
        assert made == [0, f"{name}.token\n", ""]
        names.append(named)
        assert status[0] == 2 and f"{address}: nobody listens there" in status[2]
    assert names == [[0, "two/new_1.token\n", ""], [0, "two/new_2.token\n", ""]], "a new file each time"
    assert {"new_1.token", "new_2.token"} <= {path.name for path in job.iterdir()}


def launched(cwd, *words):
    return run_scripts([(str(SCRIPTS / "launch.py"), *words)], cwd)[0]


def test_the_files_of_an_emitted_run_are_written_again_to_go_on_from_its_checkpoint(tmp_path):
    config = SCRIPTS.parent / "configs/two_hosts.py"
    told = launched(tmp_path, f"--config={config}", "--emit=two", "--hosts=10.0.0.1,10.0.0.2", "--port=7800")
    assert told[0] == 0, told
    two, run_dir = tmp_path / "two", tmp_path / "two/run_dir"
    missing = launched(tmp_path, "--resume", "--emit=two")
    assert missing[0] == 2 and "on 10.0.0.1, where its coordinator ran, the same command finds it" in missing[2]
    (two / "credentials/root.pem").unlink()  # as on the first host, where the run is resumed
    (two / "credentials/operator.pem").unlink()
    tokens = {path: path.read_bytes() for path in two.glob("credentials/*")}
    flags = (two / "host_1.flags").read_text().splitlines()
    made = run_inputs.check(json.loads((two / "config.json").read_text()), run_inputs.RunOptions())
    write_config_and_plan(run_dir, made.config, made.plan)  # as the coordinator does
    (run_dir / "checkpoints/00000060").mkdir(parents=True)
    elsewhere = ev.Part(60, 1, "0123456789abcdef" * 4, 9, ("d",))  # on the disk of the other host
    mark_complete(run_dir, ev.Checkpoint(60, 1, (elsewhere,)), about_run(made.config, made.data.checksum))
    members = (ev.Member(0, 0, 1, "10.0.0.1:7801", disk="c"), ev.Member(1, 1, 1, "10.0.0.2:7802", disk="d"))
    FileStore(run_dir / "coordinator").put("view", serialize.write(ev.View(1, 1, 1, members, (1, 1), 60)))
    refused = launched(tmp_path, "--resume", "--emit=two")
    assert refused[0] == 2 and "train.steps: got 60, expected more than the 60 of two/run_dir/check" in refused[2]
    assert "expected --emit=two" in launched(tmp_path, "--resume", "--run_dir=two")[2]
    assert (two / "host_1.flags").read_text().splitlines() == flags, "bad input overwrites nothing"

    code, out, err = launched(tmp_path, "--resume", "--emit=two", "--config.train.steps=90")
    assert code == 0, err
    first = ["--resume: train.steps is 90, it was 60", "--resume: the run continues from step 60, checkpoint "]
    assert out.splitlines()[0] == first[0] and out.splitlines()[1].startswith(first[1])
    lines = out.splitlines()[2:]
    lacks = "bring two/run_dir/checkpoints/00000060/stage_1-0123456789abcdef here before you copy: it "
    lacks += "lies in the run_dir of peer 1 on 10.0.0.2"
    lines.remove(lacks)
    assert ["00000060" in line for line in lines] == [" needs: " in line for line in lines]
    without = [line.replace(" two/run_dir/checkpoints/00000060", "") for line in lines]
    without[-1] = without[-1].replace(", where operator.pem is", "")
    assert without == told[1].splitlines(), "the same commands on the same hosts"
    again = (two / "host_1.flags").read_text().splitlines()
    assert set(again) - set(flags) == {next(f for f in again if f.startswith("--run=")), RESUMED}
    assert json.loads((two / "config.json").read_text())["train"]["steps"] == 90
    assert {path: path.read_bytes() for path in two.glob("credentials/*")} == tokens
    with shared(run_dir):
        assert "is in use: a run is under way there" in launched(tmp_path, "--resume", "--emit=two")[2]


def test_each_worker_of_a_pool_has_a_flag_file_with_a_token_of_its_own(tmp_path):
    config = SCRIPTS.parent / "configs/pool.py"
    code, out, err = launched(tmp_path, f"--config={config}", "--emit=two", "--hosts=10.0.0.1,10.0.0.2", "--port=7800")
    assert code == 0, err
    two = tmp_path / "two"
    assert {path.stem for path in two.glob("worker_*.flags")} == {f"worker_{worker}" for worker in (2, 3, 4, 5)}
    for worker in (2, 3, 4, 5):
        token = f"two/credentials/worker_{worker}.token"
        assert (two / f"worker_{worker}.flags").read_text().splitlines() == [
            f"--peer={worker}",
            "--join=10.0.0.1:7800",
            "--as=worker",
            "--run_dir=two/run_dir",
            f"--token={token}",
        ]
        assert credentials.load(tmp_path / token).holder == Holder(TOKEN, worker)
        assert f"on any host: python scripts/train.py --flagfile=two/worker_{worker}.flags" in out.splitlines()
        assert f"the host of worker {worker} needs: two/worker_{worker}.flags {token}" in out.splitlines()


def test_each_host_is_told_of_every_file_that_it_needs_by_commands_that_a_shell_reads(tmp_path):
    data = run_inputs.token_file("").path
    (tmp_path / "my data.tok").symlink_to(data)
    (tmp_path / "links.json").write_bytes((SCRIPTS.parent / "configs/networks/four_cities.json").read_bytes())
    words = ("--emit=a b'2", "--hosts=127.0.0.1,localhost", "--config.data.path=my data.tok", "--network=links.json")
    code, out, err = launched(tmp_path, f"--config={SCRIPTS.parent / 'configs/two_hosts.py'}", *words)
    assert code == 0, err
    *starts, first, second, end = [shlex.split(line.partition(": ")[2]) for line in out.splitlines()]
    assert [words[1:] for words in starts] == [
        ["scripts/coordinate.py", "--flagfile=a b'2/coordinator.flags"],
        ["scripts/train.py", "--flagfile=a b'2/host_0.flags"],
        ["scripts/train.py", "--flagfile=a b'2/host_1.flags"],
    ]
    assert end[:3] == ["python", "scripts/fleet.py", "stop"]
    assert all((tmp_path / name).is_file() for name in (*first, *second))
    assert {"my data.tok", "a b'2/launch.json", "a b'2/measured_network.json"} <= set(first)
    assert "my data.tok" in second and "a b'2/credentials/host_1.token" in second
    assert "--network=a b'2/measured_network.json" in (tmp_path / "a b'2/coordinator.flags").read_text().splitlines()
    (tmp_path / "a b'2").rename(tmp_path / "elsewhere")  # as on a host that keeps it at another place
    assert launch_flags(tmp_path / "elsewhere")["network"] == str(tmp_path / "elsewhere/measured_network.json")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("127.0.0.1,192.168.1.7", "127.0.0.1 is the loopback interface, .* so 192.168.1.7 cannot reach it"),
        ("box2,LOCALHOST.", "LOCALHOST. is the loopback interface, .* so box2 cannot reach it"),
        ("0.0.0.0,0.0.0.0", "0.0.0.0 stands for all interfaces"),
        ("box1:7700,box2", "got 'box1:7700', .* without user, port and mask"),
    ],
)
def test_an_address_that_another_host_cannot_reach_is_refused(tmp_path, hosts, said):
    config = f"--config={SCRIPTS.parent / 'configs/two_hosts.py'}"
    code, out, err = launched(tmp_path, config, "--emit=two", f"--hosts={hosts}")
    assert (code, out) == (2, "") and re.fullmatch(rf"--hosts: {said}.*\n", err), err
    assert not (tmp_path / "two").exists()


def test_a_folder_in_which_no_coordinator_has_run_is_refused_and_stays_as_it_was(job):
    before = sorted(job.rglob("*"))
    ((listed, _, _, status),) = answers(job.parent, "two")
    assert listed[0] == status[0] == 2
    assert "two/run_dir/coordinator is not there" in listed[2]
    assert "two/run_dir/coordinator_address is not there" in status[2] and "operator.pem" in status[2]
    assert sorted(job.rglob("*")) == sorted([*before, job / "new_1.token"])
