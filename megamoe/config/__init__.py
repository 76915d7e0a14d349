"""The run's configuration: schema, parts, loading, and checks that need no hardware."""

from megamoe.config.load import configure, dump_yaml, load_config, parse_config, to_dict
from megamoe.config.parts import PartChoice
from megamoe.config.schema import RunConfig

__all__ = ["PartChoice", "RunConfig", "configure", "dump_yaml", "load_config", "parse_config", "to_dict"]
