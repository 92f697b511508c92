//! Recurrent networks: cells, and what runs them over time.

mod cell;
mod gru;
mod lstm;
mod unroll;

pub use cell::{RnnCell, StackedCells};
pub use gru::{Gru, GruCell};
pub use lstm::{Lstm, LstmCell};
pub use unroll::{Rnn, RnnOptions, dynamic_rnn, static_rnn};
