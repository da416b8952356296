"""Secrets in options, variables and URLs do not reach files and logs."""

from hpctrain.files.redaction import hide_secrets, is_secret
from tests.launch.helpers import assert_refused, library


def test_secrets_are_hidden(monkeypatch):
    for name, value in {
        "HF_TOKEN": "hf_abcdefgh",
        "my_api_key": "sesame-street",
        "SHORT_KEY": "1",
        "HOME": "/home",
    }.items():
        monkeypatch.setenv(name, value)
    before = {
        "hub_token": "x", "api_tokens": "x", "Password": ["a", "b"], "token": None, "tokenSecret": "x",
        "max_new_tokens": 64, "epochs": 1, "tokenizer": "a/b",
        "command": ["--hub-token", "x", "--lr", "1", "--api-key=x", "hf_abcdefgh", "--max-new-tokens", "64"],
        "deep": [{"secret": {"a": "b"}}], "url": "https://me:pass@host/x see http://host/a@b",
        "text": "key=sesame-street /home 1",
    }  # fmt: skip
    assert hide_secrets(before) == {
        "hub_token": "***", "api_tokens": "***", "Password": "***", "token": None, "tokenSecret": "***",
        "max_new_tokens": 64, "epochs": 1, "tokenizer": "a/b",
        "command": ["--hub-token", "***", "--lr", "1", "--api-key=***", "***", "--max-new-tokens", "64"],
        "deep": [{"secret": "***"}], "url": "https://***@host/x see http://host/a@b",
        "text": "key=*** /home 1",
    }  # fmt: skip
    assert before["deep"] == [{"secret": {"a": "b"}}]


def test_names_of_secrets():
    secret = [
        "HF_TOKEN", "hf_token", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PASSWD",
        "GIT_CREDENTIALS", "HPCTRAIN_JOB_SECRET", "MONKEY", "TOKEN", "KEY", "accessTokenSecret", "API_TOKENS",
        "tokenSecret", "TOKENS_KEY", "PKEYKEY", "TOKENSTOKEN",
    ]  # fmt: skip
    others = ["max_new_tokens", "TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "TOKPKEYEN", "PATH", "_", "K"]
    assert [name for name in secret + others if is_secret(name)] == secret


# A line of a log, and what others may read of it
LINES = {
    "--api-key=sesame --lr=1 --api-key sesame --epochs 2": "--api-key=*** --lr=1 --api-key *** --epochs 2",
    "train --hub-token  sesame": "train --hub-token  ***",
    r"--password=two\ words x --token a\ b\\ y": "--password=*** x --token *** y",
    "exec --env=HF_TOKEN=sesame --env A=1": "exec --env=HF_TOKEN=*** --env A=1",
    "(DB_PASSWORD=sesame) PKEY=0 --max-new-tokens 64": "(DB_PASSWORD=*** PKEY=0 --max-new-tokens 64",
    "docker://me:pass@host:5000/image": "docker://***@host:5000/image",
    "--data=https://me:p@ss/w:rd@host/x https://t0ken@host": "--data=https://***@host/x https://***@host",
    "see http://host/a@b and http://host:80/x": "see http://host/a@b and http://host:80/x",
    "it is se$ame street1": "it is ***",
    "a token or a key: no value": "a token or a key: no value",
    "number 000000 x": "number *** x",
    "": "",
}


def test_a_log_shows_no_secret(monkeypatch):
    """Of Python, and of a launch script, which prints the command."""
    variables = {"MY_PASSWORD": "se$ame street1", "A_KEY": "000000", "B_KEY": "short"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [hide_secrets(line) for line in LINES] == list(LINES.values())
    done = library(f"hide_secrets <<'.'\n{chr(10).join(LINES)}\n.", **variables)
    assert done.stdout.splitlines() == list(LINES.values()), done.stderr


def test_words_are_quoted_so_that_their_ends_are_known():
    """As the key of a server, which has lines and spaces; what is printed still is the command."""
    script = r"""
        words=($'--api-key=a\nb c' --api-key 'a b' 'two words' $'$\nc d' 'se$ame street1' '')
        quote_words "${words[@]}" | hide_secrets
        eval "again=($(quote_words "${words[@]}"))"
        [[ ${again[*]@Q} == "${words[*]@Q}" ]] && die "see --token=abc"
    """
    done = library(script, MY_KEY="se$ame street1")
    assert done.stdout == r"$'--api-key=*** --api-key *** two\ words $'$\nc\x20d' *** ''" + " \n", done
    assert_refused(done, "see --token=***")


def test_a_list_of_words_shows_no_secret_with_spaces():
    words = ["train", "--api-key=a b", "TOKEN=a b", "--api-key", "a b", "--lr", "1", "--token"]
    hidden = ["train", "--api-key=***", "TOKEN=***", "--api-key", "***", "--lr", "1", "--token"]
    assert hide_secrets(words) == hidden
