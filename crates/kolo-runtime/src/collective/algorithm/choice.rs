//! Which algorithm a call takes: the cheapest by a table of costs, of those whose result is right to the bit if that is asked for.

use std::fmt;
use std::time::Duration;

use kolo_core::{DType, Error, Result};
use kolo_device::cpu::reduce::{ReduceOp, is_widened};
use kolo_ops::collective::CollectiveKind;

/// How the messages of a collective go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Everybody sends everything to everybody.
    Whole,
    /// Slices go straight to the rank that reduces them, and back.
    Direct,
    /// Slices go round.
    Ring,
    /// Pairs exchange halves, then quarters, and so on.
    HalvingDoubling,
    /// Up a binomial tree and down again.
    Tree,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 5] =
        [Algorithm::Whole, Algorithm::Direct, Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Tree];

    /// `ring`, …
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Whole => "whole",
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Tree => "tree",
        }
    }

    /// The algorithm of this name.
    pub fn parse(name: &str) -> Result<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
            let names = Algorithm::ALL.map(Algorithm::name).join(", ");
            Error::invalid_argument(format!("there is no algorithm '{name}', but {names}"))
        })
    }

    /// Those that compute a kind of collective.
    fn of(kind: CollectiveKind) -> &'static [Algorithm] {
        use Algorithm::{Direct, Ring, Tree, Whole};
        match kind {
            CollectiveKind::AllReduce(_) => &Algorithm::ALL,
            CollectiveKind::Reduce(..) => &[Whole, Direct],
            CollectiveKind::ReduceScatter(_) | CollectiveKind::AllGather | CollectiveKind::AllGatherUneven => {
                &[Direct, Ring]
            }
            CollectiveKind::Broadcast(_) => &[Direct, Tree],
            CollectiveKind::Gather(_)
            | CollectiveKind::Scatter(_)
            | CollectiveKind::AllToAll
            | CollectiveKind::GatherUneven(_)
            | CollectiveKind::ScatterUneven(_)
            | CollectiveKind::AllToAllUneven
            | CollectiveKind::SendReceive
            | CollectiveKind::Barrier => &[Direct],
        }
    }

    /// Whether the result has the bits of the fixed tree over ranks (`kolo_device::cpu::reduce`).
    pub fn is_exact(self, kind: CollectiveKind, dtype: DType, n_ranks: usize) -> bool {
        let Some(op) = kind.reduction() else { return true };
        match self {
            Algorithm::Whole | Algorithm::Direct => true,
            // Integers wrap around, so that their order does not matter.
            _ if !dtype.is_float() => true,
            // Partial sums are rounded on their way if they are computed with more bits than are sent.
            _ if is_widened(dtype) && !matches!(op, ReduceOp::Min | ReduceOp::Max) => {
                n_ranks <= 2 && op != ReduceOp::Mean
            }
            Algorithm::Ring => n_ranks <= 2,
            Algorithm::HalvingDoubling => n_ranks.is_power_of_two(),
            Algorithm::Tree => true,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What messages cost. A call takes the algorithm for which `base + hops · hop + messages · message + bytes / bytes_per_second` is
/// the least, of what one rank does. All ranks must have the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A call, whatever it does.
    pub base: Duration,
    /// From sending a small message until it has arrived.
    pub hop: Duration,
    /// Each further message that is sent at the same time.
    pub message: Duration,
    /// What a rank sends in a second.
    pub bytes_per_second: f64,
}

/// Those of TCP on loopback of a small machine. Between machines hops are longer, which changes little: it is their ratios
/// that count.
impl Default for Costs {
    fn default() -> Costs {
        Costs {
            base: Duration::from_micros(5),
            hop: Duration::from_micros(15),
            message: Duration::from_micros(4),
            bytes_per_second: 1.5e9,
        }
    }
}

impl Costs {
    /// How long a call takes, in seconds.
    pub fn estimate(&self, algorithm: Algorithm, kind: CollectiveKind, n_bytes: usize, n_ranks: usize) -> f64 {
        let (n, bytes) = (n_ranks as f64, n_bytes as f64);
        let others = n - 1.0;
        let depth = n.log2().ceil();
        let is_folded = f64::from(u8::from(!n_ranks.is_power_of_two()));
        let (hops, messages, sent) = match (kind, algorithm) {
            (CollectiveKind::Broadcast(_), Algorithm::Tree) => (depth, depth, depth * bytes),
            (CollectiveKind::Broadcast(_), _) => (2.0, 2.0 * others, 2.0 * bytes * others / n),
            // The share of a rank is what it gives.
            (CollectiveKind::AllGather | CollectiveKind::AllGatherUneven, Algorithm::Ring) => {
                (others, others, others * bytes)
            }
            (CollectiveKind::AllGather | CollectiveKind::AllGatherUneven, _) => (1.0, others, others * bytes),
            (CollectiveKind::ReduceScatter(_), Algorithm::Ring) => (others, others, bytes * others / n),
            (CollectiveKind::ReduceScatter(_), _) => (1.0, others, bytes * others / n),
            // The root receives.
            (CollectiveKind::Reduce(..), Algorithm::Whole) => (1.0, others, bytes * others),
            (CollectiveKind::Reduce(..), _) => (2.0, 2.0 * others, 2.0 * bytes * others / n),
            (_, Algorithm::Whole) => (1.0, others, bytes * others),
            (_, Algorithm::Direct) => (2.0, 2.0 * others, 2.0 * bytes * others / n),
            (_, Algorithm::Ring) => (2.0 * others, 2.0 * others, 2.0 * bytes * others / n),
            (_, Algorithm::HalvingDoubling) => {
                let steps = 2.0 * (f64::from(n_ranks.max(1).ilog2()) + is_folded);
                (steps, steps, 2.0 * bytes * (others / n + is_folded))
            }
            (_, Algorithm::Tree) => (2.0 * depth, 2.0 * depth, 2.0 * depth * bytes),
        };
        self.base.as_secs_f64()
            + hops * self.hop.as_secs_f64()
            + messages * self.message.as_secs_f64()
            + sent / self.bytes_per_second
    }
}

/// The algorithm of a call. `wanted` is taken if it computes this, and exactly if that is asked for.
pub(crate) fn choose(
    kind: CollectiveKind,
    dtype: Option<DType>,
    n_bytes: usize,
    n_ranks: usize,
    costs: &Costs,
    wanted: Option<Algorithm>,
    deterministic: bool,
) -> Algorithm {
    let is_right =
        |algorithm: &Algorithm| !deterministic || dtype.is_none_or(|dtype| algorithm.is_exact(kind, dtype, n_ranks));
    let fit = || Algorithm::of(kind).iter().copied().filter(is_right);
    let cost = |algorithm: &Algorithm| costs.estimate(*algorithm, kind, n_bytes, n_ranks);
    let cheapest = || fit().min_by(|a, b| cost(a).total_cmp(&cost(b)));
    fit().find(|algorithm| Some(*algorithm) == wanted).or_else(cheapest).unwrap_or(Algorithm::Direct)
}

#[cfg(test)]
mod tests {
    use kolo_ops::collective::Root;

    use super::*;

    const SUM: CollectiveKind = CollectiveKind::AllReduce(ReduceOp::Sum);

    fn chosen(kind: CollectiveKind, dtype: DType, n_bytes: usize, n_ranks: usize) -> Algorithm {
        choose(kind, Some(dtype), n_bytes, n_ranks, &Costs::default(), None, true)
    }

    #[test]
    fn small_vectors_take_few_hops_and_large_ones_few_bytes() {
        assert_eq!(chosen(SUM, DType::F32, 4096, 2), Algorithm::Whole);
        // Two ranks send as much either way.
        assert_eq!(chosen(SUM, DType::F32, 100 << 20, 2), Algorithm::Whole);
        assert_eq!(chosen(SUM, DType::F32, 100 << 20, 3), Algorithm::Direct);
        assert_eq!(chosen(SUM, DType::F32, 100 << 20, 8), Algorithm::Direct);
        // So many messages at a time cost more than a few more hops.
        assert_eq!(chosen(SUM, DType::F32, 64 << 10, 128), Algorithm::HalvingDoubling);
        assert_eq!(chosen(SUM, DType::F32, 8, 200), Algorithm::Tree);
        let broadcast = CollectiveKind::Broadcast(Root(0));
        assert_eq!(chosen(broadcast, DType::F32, 1 << 20, 2), Algorithm::Tree);
        assert_eq!(chosen(broadcast, DType::F32, 100 << 20, 8), Algorithm::Direct);
    }

    #[test]
    fn only_what_has_the_bits_of_the_fixed_tree_is_taken_if_that_is_asked_for() {
        let pinned = |dtype, n_ranks, deterministic| {
            choose(SUM, Some(dtype), 1 << 20, n_ranks, &Costs::default(), Some(Algorithm::Ring), deterministic)
        };
        assert_eq!(pinned(DType::F32, 4, true), Algorithm::Direct);
        assert_eq!(pinned(DType::F32, 4, false), Algorithm::Ring);
        assert_eq!(pinned(DType::I64, 4, true), Algorithm::Ring);
        let exact = |algorithm: Algorithm, dtype, n_ranks| algorithm.is_exact(SUM, dtype, n_ranks);
        assert!(exact(Algorithm::HalvingDoubling, DType::F32, 8) && !exact(Algorithm::HalvingDoubling, DType::F32, 6));
        assert!(exact(Algorithm::Tree, DType::F64, 7) && !exact(Algorithm::Tree, DType::BF16, 7));
    }

    #[test]
    fn an_algorithm_has_a_name() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::parse(algorithm.name()).unwrap(), algorithm);
        }
        let error = Algorithm::parse("bus").unwrap_err().to_string();
        assert!(error.contains("there is no algorithm 'bus', but whole, direct, ring"), "{error}");
    }
}
