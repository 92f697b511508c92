//! Layers, losses and metrics: functions that add parts of a model to a graph.
