"""What stands for packages of loggers in tests: modules with the methods that scripts call."""

from types import ModuleType


class Run:
    """A run of W&B: like a real one it refuses a step number that is below the last one."""

    def __init__(self, project):
        self.project, self.rows, self.axes, self.is_finished = project, [], {}, False
        self._step = 0

    def define_metric(self, name, step_metric=None, **options):
        self.axes[name] = step_metric

    def log(self, data, step=None, commit=None):
        self._step = self._step + 1 if step is None else step
        assert not self.rows or self._step >= self.rows[-1][0], "wandb drops earlier steps"
        self.rows.append((self._step, dict(data)))

    def finish(self, exit_code=None, quiet=None):
        self.is_finished = True


def make_wandb():
    """Returns a module; its `runs` are those that were begun."""
    module = ModuleType("wandb")
    module.runs = []

    def init(project=None, **options):
        module.runs.append(Run(project))
        return module.runs[-1]

    module.init = init
    return module


def make_mlflow():
    """Returns a module; its `metrics` are what was logged, with the step."""
    module = ModuleType("mlflow")
    module.metrics = []

    def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None):
        for name, value in metrics.items():
            assert isinstance(value, float), f"{name} is {value!r}"
            module.metrics.append((name, value, step))

    module.log_metrics = log_metrics
    return module
