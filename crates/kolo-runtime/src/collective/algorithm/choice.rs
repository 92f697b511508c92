//! Which algorithm a call takes: the cheapest by a table of costs, of those whose result is right to the bit if that is asked for.

use std::fmt;
use std::time::Duration;

use kolo_core::{DType, Error, Result};
use kolo_device::cpu::reduce::{ReduceOp, is_widened};
use kolo_ops::collective::CollectiveKind;

use super::super::hosts::Layout;

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
    /// Inside of each host, then between hosts, and back.
    TwoLevel,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::Whole,
        Algorithm::Direct,
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::Tree,
        Algorithm::TwoLevel,
    ];

    /// `ring`, …
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Whole => "whole",
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Tree => "tree",
            Algorithm::TwoLevel => "two-level",
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

    /// Whether the result has the bits of the fixed tree over ranks (`kolo_device::cpu::reduce`), which are on hosts as `layout` says.
    pub fn is_exact(self, kind: CollectiveKind, dtype: DType, n_ranks: usize, layout: Option<&Layout>) -> bool {
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
            Algorithm::TwoLevel => layout.is_some_and(|layout| layout.is_branches),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What messages cost. A call takes the algorithm for which `base + hops · hop + messages · message + bytes / bytes_per_second` is
/// the least, of what one rank does; between hosts, the bytes of all ranks of a host share what it can send. All ranks must have the
/// same: those that join a group take those of rank 0.
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
    /// What a host sends to others in a second.
    pub host_bytes_per_second: f64,
    /// A call of ranks of one host that share memory.
    pub memory_base: Duration,
    /// How much of a vector they reduce in a second, each getting all of it.
    pub memory_bytes_per_second: f64,
}

/// Those of a small machine: messages are over TCP on loopback, and hosts have links of 10 Gbit/s. Between machines hops are longer,
/// which changes little: it is their ratios that count.
impl Default for Costs {
    fn default() -> Costs {
        Costs {
            base: Duration::from_micros(5),
            hop: Duration::from_micros(15),
            message: Duration::from_micros(4),
            bytes_per_second: 1.5e9,
            host_bytes_per_second: 1.25e9,
            memory_base: Duration::from_micros(4),
            memory_bytes_per_second: 3e9,
        }
    }
}

impl Costs {
    /// How long a call takes, in seconds. Ranks without a layout are on one host.
    pub fn estimate(
        &self,
        algorithm: Algorithm,
        kind: CollectiveKind,
        n_bytes: usize,
        n_ranks: usize,
        layout: Option<&Layout>,
    ) -> f64 {
        let (n, bytes) = (n_ranks as f64, n_bytes as f64);
        let others = n - 1.0;
        if let (Algorithm::TwoLevel, Some(layout)) = (algorithm, layout) {
            return self.estimate_two_levels(layout, kind, n_bytes, others);
        }
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
            (_, Algorithm::Direct | Algorithm::TwoLevel) => (2.0, 2.0 * others, 2.0 * bytes * others / n),
            (_, Algorithm::Ring) => (2.0 * others, 2.0 * others, 2.0 * bytes * others / n),
            (_, Algorithm::HalvingDoubling) => {
                let steps = 2.0 * (f64::from(n_ranks.max(1).ilog2()) + is_folded);
                (steps, steps, 2.0 * bytes * (others / n + is_folded))
            }
            (_, Algorithm::Tree) => (2.0 * depth, 2.0 * depth, 2.0 * depth * bytes),
        };
        let sending = match layout {
            Some(layout) => self.time_between_hosts(algorithm, layout, bytes, sent, n),
            None => sent / self.bytes_per_second,
        };
        self.base.as_secs_f64() + hops * self.hop.as_secs_f64() + messages * self.message.as_secs_f64() + sending
    }

    /// How long ranks on several hosts send, if each sends so much in all.
    fn time_between_hosts(&self, algorithm: Algorithm, layout: &Layout, bytes: f64, sent: f64, n_ranks: f64) -> f64 {
        let (here, n_hosts) = (layout.most_ranks as f64, layout.n_hosts as f64);
        let time =
            |inside: f64, leaves_host: f64| (inside / self.bytes_per_second, leaves_host / self.host_bytes_per_second);
        match algorithm {
            // Neighbours first, with the most; between hosts go quarters, eighths and so on, after that.
            Algorithm::HalvingDoubling if layout.is_branches => {
                let leaves_host = 2.0 * bytes * (n_hosts - 1.0) / n_hosts;
                let (inside, between) = time(sent - leaves_host / here, leaves_host);
                inside + between
            }
            // The first rank of a host goes on when it has its sum.
            Algorithm::Tree if layout.is_branches => {
                let leaves_host = 2.0 * bytes * n_hosts.log2().ceil();
                let (inside, between) = time((sent - leaves_host).max(0.0), leaves_host);
                inside + between
            }
            // Others send to all at the same time; in a ring, only the last rank of a host to another one.
            Algorithm::Ring if layout.is_branches => {
                let (inside, between) = time(sent, sent);
                inside.max(between)
            }
            _ => {
                let (inside, between) = time(sent, here * sent * (n_ranks - here) / (n_ranks - 1.0).max(1.0));
                inside.max(between)
            }
        }
    }

    /// The ranks compare what they do, sum in the memory of their hosts, and exchange the sums.
    fn estimate_two_levels(&self, layout: &Layout, kind: CollectiveKind, n_bytes: usize, others: f64) -> f64 {
        let (n_hosts, n_sending) = (layout.n_hosts, if layout.is_even { layout.most_ranks.max(1) } else { 1 });
        let slice = n_bytes / n_sending;
        let time = |algorithm: Algorithm| {
            let messages = self.estimate(algorithm, kind, slice, n_hosts, None) - self.base.as_secs_f64();
            let share = if algorithm == Algorithm::Whole { 1.0 } else { 2.0 / n_hosts as f64 };
            let leaves_host = share * (n_hosts as f64 - 1.0) * n_bytes as f64;
            messages.max(leaves_host / self.host_bytes_per_second)
        };
        let between = time(Algorithm::Whole).min(time(Algorithm::Direct));
        let compared = (self.base + self.hop).as_secs_f64() + others * self.message.as_secs_f64();
        let in_memory = 2.0 * self.memory_base.as_secs_f64() + n_bytes as f64 / self.memory_bytes_per_second;
        compared + in_memory + between
    }
}

/// What a group chooses by.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// The number of ranks.
    pub n_ranks: usize,
    /// On which hosts they are, if there are several.
    pub layout: Option<Layout>,
    /// Whether those of a host share memory, so that a call can go by two levels.
    pub shares_memory: bool,
    /// What messages cost.
    pub costs: &'a Costs,
    /// Taken where it computes this, and exactly if that is asked for.
    pub wanted: Option<Algorithm>,
    /// Only what has the bits of the fixed tree over ranks.
    pub deterministic: bool,
}

impl Choice<'_> {
    /// The algorithm of a call.
    pub fn choose(&self, kind: CollectiveKind, dtype: Option<DType>, n_bytes: usize) -> Algorithm {
        let (n_ranks, layout) = (self.n_ranks, self.layout.as_ref());
        let is_right = |algorithm: &Algorithm| {
            (*algorithm != Algorithm::TwoLevel || (self.shares_memory && layout.is_some()))
                && (!self.deterministic || dtype.is_none_or(|dtype| algorithm.is_exact(kind, dtype, n_ranks, layout)))
        };
        let fit = || Algorithm::of(kind).iter().copied().filter(is_right);
        let cost = |algorithm: &Algorithm| self.costs.estimate(*algorithm, kind, n_bytes, n_ranks, layout);
        let cheapest = || fit().min_by(|a, b| cost(a).total_cmp(&cost(b)));
        fit().find(|algorithm| Some(*algorithm) == self.wanted).or_else(cheapest).unwrap_or(Algorithm::Direct)
    }
}

#[cfg(test)]
mod tests {
    use kolo_ops::collective::Root;

    use super::*;

    const SUM: CollectiveKind = CollectiveKind::AllReduce(ReduceOp::Sum);

    fn chosen(kind: CollectiveKind, dtype: DType, n_bytes: usize, n_ranks: usize) -> Algorithm {
        let costs = &Costs::default();
        let choice = Choice { n_ranks, layout: None, shares_memory: false, costs, wanted: None, deterministic: true };
        choice.choose(kind, Some(dtype), n_bytes)
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
            let (costs, wanted) = (&Costs::default(), Some(Algorithm::Ring));
            let choice = Choice { n_ranks, layout: None, shares_memory: false, costs, wanted, deterministic };
            choice.choose(SUM, Some(dtype), 1 << 20)
        };
        assert_eq!(pinned(DType::F32, 4, true), Algorithm::Direct);
        assert_eq!(pinned(DType::F32, 4, false), Algorithm::Ring);
        assert_eq!(pinned(DType::I64, 4, true), Algorithm::Ring);
        let exact = |algorithm: Algorithm, dtype, n_ranks| algorithm.is_exact(SUM, dtype, n_ranks, None);
        assert!(exact(Algorithm::HalvingDoubling, DType::F32, 8) && !exact(Algorithm::HalvingDoubling, DType::F32, 6));
        assert!(exact(Algorithm::Tree, DType::F64, 7) && !exact(Algorithm::Tree, DType::BF16, 7));
    }

    #[test]
    fn ranks_on_several_hosts_go_by_two_levels_where_that_is_cheaper_and_right() {
        let layout = |n_hosts, most_ranks| Layout { n_hosts, most_ranks, is_even: true, is_branches: true };
        let chosen = |dtype, n_bytes, layout: Layout, deterministic| {
            let (costs, n_ranks) = (&Costs::default(), layout.n_hosts * layout.most_ranks);
            let layout = Some(layout);
            let choice = Choice { n_ranks, layout, shares_memory: true, costs, wanted: None, deterministic };
            choice.choose(SUM, Some(dtype), n_bytes)
        };
        // What is small needs few hops, whoever shares memory.
        assert_eq!(chosen(DType::F32, 64, layout(2, 2), true), Algorithm::Whole);
        assert_eq!(chosen(DType::F32, 16 << 20, layout(4, 8), true), Algorithm::TwoLevel);
        // A sum of halves would be rounded once more, and one of scattered ranks is in another order.
        assert_ne!(chosen(DType::BF16, 16 << 20, layout(4, 8), true), Algorithm::TwoLevel);
        assert_eq!(chosen(DType::BF16, 16 << 20, layout(4, 8), false), Algorithm::TwoLevel);
        let scattered = Layout { is_branches: false, ..layout(4, 8) };
        assert_ne!(chosen(DType::F32, 16 << 20, scattered, true), Algorithm::TwoLevel);
        assert_eq!(chosen(DType::I32, 16 << 20, scattered, true), Algorithm::TwoLevel);
        // The slower the link between hosts, the smaller the vectors for which it is worth it.
        let least = |host_bytes_per_second| {
            let costs = &Costs { host_bytes_per_second, ..Costs::default() };
            let (layout, shares_memory) = (Some(layout(2, 4)), true);
            let choice = Choice { n_ranks: 8, layout, shares_memory, costs, wanted: None, deterministic: true };
            let is_worth_it = |bit: &u32| choice.choose(SUM, Some(DType::F32), 1 << bit) == Algorithm::TwoLevel;
            (4..30).find(is_worth_it).unwrap_or(30)
        };
        assert!(least(1e8) < least(1e10), "{} {}", least(1e8), least(1e10));
    }

    /// Also where there is only one way between levels: hosts of one rank, and hosts whose ranks cannot share memory.
    #[test]
    fn the_link_between_hosts_counts_wherever_there_are_several() {
        for (n_hosts, most_ranks) in [(4, 1), (2, 4)] {
            let layout = Some(Layout { n_hosts, most_ranks, is_even: true, is_branches: true });
            let least = |host_bytes_per_second| {
                let costs = &Costs { host_bytes_per_second, ..Costs::default() };
                let n_ranks = n_hosts * most_ranks;
                let choice = Choice { n_ranks, layout, shares_memory: false, costs, wanted: None, deterministic: true };
                let chosen = |bit: u32| choice.choose(SUM, Some(DType::F32), 1 << bit);
                assert!((4..30).all(|bit| chosen(bit) != Algorithm::TwoLevel));
                // What takes one hop sends the most.
                (4..30).find(|bit| chosen(*bit) != Algorithm::Whole).unwrap_or(30)
            };
            assert!(least(1e7) < least(1e10), "{n_hosts} hosts: {} {}", least(1e7), least(1e10));
        }
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
