"""Tasks of Slurm as ranks."""

from __future__ import annotations

import pytest

from gradlane.errors import InputError
from gradlane.live.startup.slurm import is_rank, rank_variables

TASK = {  # as srun sets them for a task of six on two hosts
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
}


def test_a_task_has_the_variables_of_a_rank():
    assert rank_variables(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20_000 + (4711 * 7 + 2) % 20_000),
    }


def test_an_address_and_a_port_that_are_there_stay():
    found = rank_variables({**TASK, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.7", "29500")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("rack2-[7]-a,rack3-[1-2]-b", "rack2-7-a"),
        ("n-1.example.org,n-2.example.org", "n-1.example.org"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert rank_variables({**TASK, "SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


@pytest.mark.parametrize(("tasks", "host", "here"), [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("8", 0, 8)])
def test_the_tasks_of_a_host(tasks, host, here):
    found = rank_variables({**TASK, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(host)})
    assert found["LOCAL_WORLD_SIZE"] == str(here)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: got '', expected a list of hosts"),
        ({"SLURM_STEP_NODELIST": "[1-2]"}, "set MASTER_ADDR to rank 0's host"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM_STEP_TASKS_PER_NODE: got '4', expected the tasks of 2 or more hosts"),
        ({"SLURM_LOCALID": "first"}, "SLURM_LOCALID: got 'first', expected a number"),
    ],
)
def test_what_cannot_be_read_is_named(change, says):
    with pytest.raises(InputError, match=says.replace("[", r"\[")):
        rank_variables({**TASK, **change})


@pytest.mark.parametrize("change", [{"RANK": "0"}, {"SLURM_NTASKS": "1"}, {"SLURM_PROCID": None}, {"SLURM_STEP_ID": None}])
def test_what_is_a_rank_already_or_alone_or_no_task_is_left_as_it_is(change):
    environment = {name: value for name, value in {**TASK, **change}.items() if value is not None}
    assert is_rank(TASK)
    assert not is_rank(environment)
