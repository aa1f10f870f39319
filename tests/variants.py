"""Sections of a recipe by the name of their variant, as a recipe's YAML gives them."""

from __future__ import annotations

from typing import Any

from ddnn.recipe.schema import (
    AdamConfig,
    AsyncConfig,
    AveragingConfig,
    BmufConfig,
    ConstantConfig,
    ElasticConfig,
    ExponentialConfig,
    MuonConfig,
    NewbobConfig,
    NgSgdConfig,
    OptimizerConfig,
    ParallelConfig,
    PassesConfig,
    PowerConfig,
    ScheduleConfig,
    SgdConfig,
    ShampooConfig,
)


def make_optimizer_config(name: str = "sgd", **keys: Any) -> OptimizerConfig:
    """`optimizer`, without the keys of NG-SGD where `name` is sgd."""
    others = {"ng-sgd": NgSgdConfig, "adam": AdamConfig, "muon": MuonConfig, "shampoo": ShampooConfig}
    if name in others:
        return others[name](**keys)
    return SgdConfig(**{key: value for key, value in keys.items() if key in SgdConfig.model_fields})


def make_schedule_config(name: str = "newbob", **keys: Any) -> ScheduleConfig:
    """`schedule`."""
    kinds = {
        "newbob": NewbobConfig,
        "exponential": ExponentialConfig,
        "constant": ConstantConfig,
        "power": PowerConfig,
        "passes": PassesConfig,
    }
    return kinds[name](**keys)


def make_parallel_config(strategy: str = "all-reduce", **keys: Any) -> ParallelConfig:
    """`parallel`, without the keys that are None."""
    given = {key: value for key, value in keys.items() if value is not None}
    if strategy != "all-reduce":
        given["strategy"] = strategy
    return {"bmuf": BmufConfig, "elastic": ElasticConfig, "async": AsyncConfig}.get(strategy, AveragingConfig)(**given)
