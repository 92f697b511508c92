//! Optimizers: what turns a loss into an update of the variables.
