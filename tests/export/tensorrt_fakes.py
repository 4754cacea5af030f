"""TensorRT 10 and 11 as far as the builder calls them, recording what it asks for.

Every public name below exists in the bindings of TensorRT 11 (test_tensorrt_calls.py looks them up
in the wheel), so a call that TensorRT does not have cannot pass here.
"""

from __future__ import annotations

import enum
import types
from typing import Any


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity


NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", ["STRONGLY_TYPED"])
BuilderFlag = enum.Enum("BuilderFlag", ["TF32"])
ProfilingVerbosity = enum.Enum("ProfilingVerbosity", ["DETAILED"])
MemoryPoolType = enum.Enum("MemoryPoolType", ["WORKSPACE"])
HardwareCompatibilityLevel = enum.Enum("HardwareCompatibilityLevel", ["AMPERE_PLUS"])
LayerType = enum.Enum("LayerType", ["MATRIX_MULTIPLY", "PLUGIN_V3"])


class Recorded(types.SimpleNamespace):
    """What a test looks at after a build."""

    flags = 0
    profile: Any = None
    parsed: Any = None
    cache_in: bytes | None = None
    cleared: Any = None
    config: Any = None


def fake_tensorrt(version: str, record: Recorded, *, starts: bool = True) -> types.ModuleType:
    """A module ``tensorrt`` of one version; ``starts`` false: there is no GPU."""

    class Network:
        num_layers = 2

        def get_input(self, index: int) -> Any:
            return types.SimpleNamespace(name="images", shape=record.shape)

        def get_layer(self, index: int) -> Any:
            return types.SimpleNamespace(type=list(LayerType)[index])

    class Profile:
        def set_shape(self, name: str, least: tuple, best: tuple, most: tuple) -> None:
            record.profile = (name, least, best, most)

    class TimingCache:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def serialize(self) -> bytes:
            return self.content + b" and measured"

    class Config:
        def __init__(self) -> None:
            record.config = self

        def clear_flag(self, flag: Any) -> None:
            record.cleared = flag

        def set_memory_pool_limit(self, pool: Any, size: int) -> None:
            record.pool = (pool, size)

        def add_optimization_profile(self, profile: Profile) -> int:
            return 0

        def create_timing_cache(self, content: bytes) -> TimingCache:
            record.cache_in = content
            return TimingCache(content)

        def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
            self.cache = cache
            assert ignore_mismatch is False
            return cache.content != b"of another card"

        def get_timing_cache(self) -> TimingCache:
            return self.cache

    class Builder:
        def __init__(self, log: Any) -> None:
            self.log = log
            if not starts:
                log.log(Severity.INTERNAL_ERROR, "CUDA initialization failure with error: 35")
                raise TypeError("pybind11::init(): factory function returned nullptr")

        def create_network(self, flags: int) -> Network:
            record.flags = flags
            return Network()

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
            if record.refuse:
                self.log.log(Severity.ERROR, "no implementation\n for node 7")
                return None
            self.log.log(
                Severity.VERBOSE, "Layers:\nName: a, LayerType: gemm\nName: b, LayerType: kgen"
            )
            return b"an engine"

    class OnnxParser:
        num_errors = 1

        def __init__(self, network: Network, log: Any) -> None:
            pass

        def parse_from_file(self, path: str) -> bool:
            record.parsed = path
            return record.parses

        def parse(self, model: bytes, path: str) -> bool:
            record.parsed = (model, path)
            return record.parses

        def get_error(self, index: int) -> Any:
            return types.SimpleNamespace(desc=lambda: "node 3 is not known")

    module = types.ModuleType("tensorrt")
    members = {
        kind.__name__: kind
        for kind in (
            ILogger, Builder, OnnxParser, NetworkDefinitionCreationFlag, BuilderFlag,
            ProfilingVerbosity, MemoryPoolType, HardwareCompatibilityLevel,
        )
    }  # fmt: skip
    vars(module).update(members, __version__=version)
    record.classes = (Network, Profile, TimingCache, Config, Builder, OnnxParser)
    record.enums = (
        NetworkDefinitionCreationFlag, BuilderFlag, ProfilingVerbosity, MemoryPoolType,
        HardwareCompatibilityLevel,
    )  # fmt: skip
    return module
