"""The laboratory: tasks, models, training, studies, evaluation, reports and benchmarks, on top of the library."""
