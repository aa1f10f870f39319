"""What a path holds, in a glance: `describe_path`."""

from ddnn.info.path import Info, describe_path

__all__ = ["Info", "describe_path"]
