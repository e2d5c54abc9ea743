"""The `model_urls` that each file of `torchvision.models` had: `model_urls.resnet` is that of resnet.py."""

import importlib

FILES = ("resnet", "vgg", "densenet", "alexnet", "squeezenet", "inception", "googlenet")
# Where a name of today is not the key of those years.
OLD = {"inception_v3": "inception_v3_google"}


def __getattr__(name: str) -> dict[str, str]:
    if name not in FILES:  # as what the import system asks for
        raise AttributeError(name)
    models = importlib.import_module(f"torchvision.models.{name}")
    names = [each.removesuffix("_Weights") for each in vars(models) if each.endswith("_Weights")]
    by_name = {name.lower(): getattr(models, f"{name}_Weights") for name in names}
    return {
        OLD.get(key, key): weights.IMAGENET1K_V1.url
        for key, weights in by_name.items()
        if hasattr(weights, "IMAGENET1K_V1")
    }
