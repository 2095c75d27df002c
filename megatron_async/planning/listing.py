# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--model list`: the presets as a table."""

from rich.table import Table

from megatron_async.models.presets import PRESETS
from megatron_async.planning.units import amount


def preset_table() -> Table:
    """Name, layers, parameters and source of every preset."""
    table = Table(title="--model NAME sets Megatron's architecture arguments; an explicit argument wins")
    for heading in ("name", "layers", "parameters", "active", "model", "source"):
        table.add_column(heading, justify="right" if heading in ("layers", "parameters", "active") else "left")
    for name, preset in PRESETS.items():
        source = f"miniature of {preset.miniature_of}" if preset.miniature_of else preset.source
        layers = str(preset.arguments["num_layers"])
        table.add_row(name, layers, amount(preset.total), amount(preset.active), preset.summary, source)
    return table
