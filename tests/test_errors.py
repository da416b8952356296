"""Errors as ranks print them."""

import io
import sys

from hpctrain.errors import print_error


class Pipe(io.RawIOBase):
    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, data):
        self.writes.append(bytes(data))
        return len(data)


def test_an_error_is_one_write_so_that_lines_of_ranks_do_not_mix(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(pipe := Pipe(), write_through=True))
    print_error("hpctrain: error: one\nhpctrain: two")
    assert pipe.writes == [b"hpctrain: error: one\nhpctrain: two\n"]
