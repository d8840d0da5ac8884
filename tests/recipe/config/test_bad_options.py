"""A bad value of any command's option is one line that names it."""

import pytest
from test_bad_input import LONG, URL

import jshard.export
import jshard.inspect
import jshard.launch
import jshard.plan.__main__
import jshard.plan.topology
import jshard.tokenize
import jshard.train

OPTIONS = {
    jshard.train: {
        "config": ("", LONG, "nosuch", URL),
        "workdir": ("", LONG, URL, "s3://bucket", "hf://me/run"),
        "coordinator": ("", "a", "a:", "a:0", "a:65536", "a:many", f"{LONG}:1", ":7"),
        "num_processes": ("", "0", "-1", "many", "nan", "1e3", "1" + "0" * 20, LONG),
        "process_id": ("", "-1", "2", "many", "nan", "1" + "0" * 20, LONG),
        "local_device_ids": ("", "a", "-1", "0,0", "0,", "1" + "0" * 20, LONG),
    },
    jshard.plan.__main__: {
        "config": ("", LONG, "nosuch", URL),
        "topology": (
            *("", "h100", "h100:", "h100:0", "h100:-8", "h100:9", "h1000:8", LONG),
            *("h100:many", "h100:" + "9" * 20, "h100:" + "9" * 5000),
        ),
        "constants": ("", LONG, "/", "/nosuch", URL),
        "json": ("", LONG, "/", "/nosuch/file", URL),
        "html": ("", LONG, "/", "/nosuch/file", URL),
        "trace": ("", LONG, "/", "/nosuch/file", URL),
        "hlo": ("", LONG, "/", "/nosuch/file", URL),
        "fit": ("", LONG, "/", "/nosuch/file", URL),
        "from-hlo": ("", LONG, "/", "/nosuch", URL),
        "search": ("nosuch", LONG),
        "topologies": ("", ",", "h100", "h100:9", "h100:8..4", "h1000:8..16", LONG),
        "tokens": ("", "0", "-1", "many", "nan", "inf"),
        "prices": ("", LONG, "/", "/nosuch", "/dev/null", URL),
        "days": ("", "0", "-1", "many", "nan"),
        "budget": ("", "0", "-1", "many", "nan"),
        "limit": ("", "0", "-1", "many", "²", "9" * 5000),
    },
    jshard.launch: {
        "num_processes": ("", "0", "-1", "many", "nan", "1" + "0" * 20, "9" * 5000),
        "hosts": ("", ",", "a,,b", "-oProxyCommand=x", "a b", LONG),
        "rsh": ("", "/nosuch", "'", LONG),
        "port": ("", "0", "-1", "65536", "many", "1" + "0" * 20),
        "max_restarts": ("", "-1", "many", "1" + "0" * 20),
        "min_hosts": ("", "0", "-1", "3", "many", "1" + "0" * 20),
    },
    jshard.inspect: {"PATH": ("", "/nosuch", LONG, "/dev/null", URL)},
    jshard.export: {
        "PATH": ("", "/nosuch", LONG, "/dev/null", URL),
        "output": (LONG, URL),
        "dtype": ("", "int8", "nosuch", LONG),
        "max_shard_size": ("", "0GB", "-1GB", "nan", "5", LONG),
    },
    jshard.tokenize: {
        "PATH": ("", LONG, URL),
        "tokenizer": ("", "/nosuch", "/dev/null", LONG, URL),
        "output": ("", LONG, URL),
        "workers": ("", "0", "-1", "many", "nan", "1" + "0" * 20, LONG),
    },
}
OF_QUESTIONS = ("topologies", "tokens", "prices", "days", "budget")  # of the planner
# What makes the rest of a command line good.
GOOD = {
    jshard.train: {
        "config": "gpt.py",
        "num_processes": "2",
        "process_id": "0",
        "coordinator": "127.0.0.1:7",
    },
    jshard.plan.__main__: {"config": "gpt.py", "topology": "h100:8"},
    jshard.launch: {"num_processes": "2"},
    jshard.inspect: {"PATH": "/nosuch"},
    jshard.export: {"PATH": "/nosuch", "output": "nosuch"},
    jshard.tokenize: {"PATH": "/nosuch", "tokenizer": "/nosuch", "output": "nosuch"},
}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        pytest.param(command, option, id=f"{command.__name__}-{option}")
        for command, options in OPTIONS.items()
        for option in options
    ],
)
def test_a_bad_value_of_any_option_is_one_line_that_names_it(
    command, option, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for text in OPTIONS[command][option]:
        given = GOOD[command] | {option: text}
        if option == "limit":
            given["search"] = ""
        if option == "from-hlo":
            del given["config"]
        if option in OF_QUESTIONS:
            given |= {"topologies": "h100:8", "tokens": "1e9"} | {option: text}
            del given["topology"]
        if option in ("rsh", "min_hosts"):
            given["hosts"] = "a,b"
        if option == "PATH":
            words = [text]
        else:
            words = [given.pop("PATH")] if "PATH" in given else []
        words += [
            f"--{name}={value}" if value or name != "search" else "--search"
            for name, value in given.items()
            if name != "PATH"
        ]
        if command is jshard.launch:
            words += ["--", "--config=gpt.py"]
        named = (option, text[:20]) if option in ("PATH", "config") else (option,)
        refused(command, words, *named)
    if option != "PATH":
        words = [f"--{option[:-1]}x=1"]
        refused(command, words, *words, "unknown argument")
