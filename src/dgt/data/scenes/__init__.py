"""The built-in scenes: coloured shapes on textured backgrounds, drawn on demand."""

from dgt.data.scenes.scenes import Scene, SceneOptions, Scenes, draw_scene

__all__ = ["Scene", "SceneOptions", "Scenes", "draw_scene"]
