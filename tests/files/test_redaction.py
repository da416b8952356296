"""Secrets in options, variables and URLs do not reach files and logs."""

from hpctrain.files.redaction import hide_secrets, is_secret


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
