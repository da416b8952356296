"""Faults that the driver of a GPU has counted. There is no GPU here: a stand-in answers as NVML does."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hpctrain.commands.check import check, gpu_faults

UUID = "8c9a4a5f-0000-0000-0000-000000000000"
CUDA = torch.device("cuda", 0)


class Nvml:
    """As nvidia-ml-py: functions that raise NVMLError where the GPU does not support them."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, nvmlEventTypeXidCriticalError = 1, 0, 8

    def __init__(self, xids=(), **values):
        self._values, self._xids = values, list(xids)

    def __getattr__(self, name):
        if name not in self._values:
            raise AttributeError(name)
        return lambda *_: self._values[name]

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == f"GPU-{UUID}"
        return "handle"

    def _unsupported(self, *_):
        raise self.NVMLError

    def nvmlEventSetCreate(self):
        return "events"

    def nvmlEventSetFree(self, events):
        pass

    def nvmlDeviceRegisterEvents(self, *_):
        pass

    def nvmlEventSetWait_v2(self, events, milliseconds):
        if not self._xids:
            raise self.NVMLError
        return SimpleNamespace(eventData=self._xids.pop(0))


def nvml(**values):
    names = ("TotalEccErrors", "RetiredPagesPendingStatus", "RemappedRows")
    made = Nvml(values.pop("xids", ()))
    for name in names:
        value = values.get(name)
        function = made._unsupported if value is None else (lambda *_, value=value: value)
        setattr(made, f"nvmlDeviceGet{name}", function)
    return made


@pytest.fixture
def gpu(monkeypatch):
    """A function that puts this NVML, and a GPU, in the place of the real ones."""

    def put(module):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        properties = SimpleNamespace(name="NVIDIA H200", uuid=UUID)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return put


# remapped rows: corrected, uncorrected, pending, failed (github.com/NVIDIA/go-nvml, GetRemappedRows)
HEALTHY = {"TotalEccErrors": 0, "RemappedRows": (0, 0, 0, 0)}


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (HEALTHY, []),
        ({"TotalEccErrors": 0, "RetiredPagesPendingStatus": 0}, []),  # a V100 has no rows to remap
        ({}, []),  # ECC is off
        (HEALTHY | {"RemappedRows": (3, 1, 0, 0)}, []),  # replaced, as it should be
        (HEALTHY | {"TotalEccErrors": 2}, []),  # the rows may be replaced since
        (HEALTHY | {"RemappedRows": (0, 1, 1, 0)}, ["rows to remap pending"]),
        (HEALTHY | {"RemappedRows": (0, 9, 0, 1)}, ["row remapping failed"]),
        ({"TotalEccErrors": 1, "RetiredPagesPendingStatus": 1}, ["pages to retire pending"]),
    ],
)
def test_what_the_driver_has_counted(gpu, values, texts):
    gpu(nvml(**values))
    found, warning = gpu_faults.gpu_faults(CUDA)
    errors = values.get("TotalEccErrors")
    assert (f" has had {errors} uncorrected memory error" in warning) if errors else warning == ""
    assert len(found) == len(texts) and all(text in line for line, text in zip(found, texts, strict=True))
    assert all(f"the NVIDIA H200 GPU-{UUID}" in line and "--exclude" in line for line in found)


def test_xids_of_the_check(gpu):
    gpu(nvml(xids=[79, 48]))
    with gpu_faults.watch_xids(CUDA) as xids:
        found = xids()
    assert [text in line for text, line in zip(("Xid 79", "Xid 48"), found, strict=True)] == [True, True]


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_without_nvml_there_is_no_fault(gpu, module):
    gpu(module)
    assert gpu_faults.gpu_faults(CUDA) == ([], "")
    with gpu_faults.watch_xids(CUDA) as xids:
        assert xids() == []
    assert gpu_faults.gpu_faults(torch.device("cpu")) == ([], "")


def test_the_warning_names_the_rank(gpu):
    gpu(nvml(**HEALTHY | {"TotalEccErrors": 1}))
    _, warning = gpu_faults.gpu_faults(CUDA)
    report = {"host": "n2", "rank": 0, "others_gpus": [], "visible_gpus": 4, "local_size": 4}
    (line,) = check.gpu_warnings([report | {"gpu_warning": warning}])
    assert line.startswith("warning: rank 0 on n2: the NVIDIA H200 GPU-") and "--exclude" in line
