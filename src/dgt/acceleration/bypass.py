"""Settings of timm, transformers and diffusers with which attention does not call
``F.scaled_dot_product_attention``, and what to do about them.
"""

from torch import nn

REMEDIES = {
    "timm": "set fused_attn of its attention modules to True, or create the model after "
    "timm.layers.set_fused_attn(True), without TIMM_FUSED_ATTN=0",
    "transformers": 'load it with attn_implementation="sdpa", or call '
    'model.set_attn_implementation("sdpa")',
    "diffusers": "call model.set_attn_processor(AttnProcessor2_0())",
}
OTHER_PROCESSORS = ("AttnProcessor", "SlicedAttnProcessor", "XFormersAttnProcessor")


def bypass_at(model: nn.Module, name: str) -> str | None:
    """What has a module of a model compute attention in another way, and the remedy; None if
    nothing is known to.
    """
    found = bypass_of(model.get_submodule(name))
    while found is None and name:  # some have their configuration from what is around them
        name = name.rpartition(".")[0]
        found = bypass_of(model.get_submodule(name))
    return found or None


def bypass_in(model: nn.Module) -> str | None:
    """What has some module of a model compute attention in another way, and the remedy."""
    return next(filter(None, map(bypass_of, model.modules())), None)


def bypass_of(module: nn.Module) -> str | None:
    """What has a module compute attention in another way, and the remedy; None if it does not say,
    and an empty string if it says that nothing does.
    """
    if getattr(module, "fused_attn", None) is False:
        return f"timm's fused attention is off: {REMEDIES['timm']}"
    processor = type(getattr(module, "processor", None)).__name__
    if processor in OTHER_PROCESSORS:
        return f"its attention processor is {processor}: {REMEDIES['diffusers']}"
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not isinstance(name, str):
        return None
    if name != "eager" and "flash" not in name and "flex" not in name:
        return ""
    return f"its attn_implementation is {name!r}: {REMEDIES['transformers']}"
