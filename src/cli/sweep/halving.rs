//! Successive halving: which runs go on after a rung.

/// The runs that are stopped at a rung: the worse half by their scores, of which the smaller is the better. Of an odd number, the middle one
/// goes on. Runs that are equally good go on in their order.
pub fn worse_half(scores: &[(usize, f64)]) -> Vec<usize> {
    let mut sorted: Vec<(usize, f64)> = scores.to_vec();
    sorted.sort_by(|(i, a), (j, b)| a.total_cmp(b).then(i.cmp(j)));
    sorted.split_off(scores.len().div_ceil(2)).into_iter().map(|(run, _)| run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_half_goes_on() {
        assert_eq!(worse_half(&[(0, 0.5), (1, 0.1), (2, 0.7), (3, 0.3)]), [0, 2]);
        assert_eq!(worse_half(&[(4, 0.5), (5, 0.1), (6, 0.7)]), [6]);
        assert_eq!(worse_half(&[(0, 1.0), (1, 1.0)]), [1]);
        assert_eq!(worse_half(&[(3, 1.0)]), [0usize; 0]);
        // What is no number is worse than any.
        assert_eq!(worse_half(&[(0, f64::NAN), (1, 1e30)]), [0]);
    }
}
