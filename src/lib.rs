//! Kolo.
