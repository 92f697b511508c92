//! Errors as text for other processes, in the form that TensorFlow's clients look for.

use kolo_core::Error;

/// The message, with the node it happened in at the end: clients read its name from there.
pub(crate) fn text(error: &Error) -> String {
    match error.node() {
        Some(place) => format!("{}\n\t [[{{{{node {}}}}}]]", error.message(), place.node),
        None => error.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_stands_where_clients_look_for_it() {
        let error = Error::invalid_argument("wrong").with_node("a/b", "Add", "/cpu:0");
        assert_eq!(text(&error), "wrong\n\t [[{{node a/b}}]]");
        assert_eq!(text(&Error::invalid_argument("wrong")), "wrong");
    }
}
