//! The feeds, fetches and targets of a run, by node id, and the checks that local and remote sessions share before a
//! run.

use std::collections::HashSet;

use kolo_core::{DType, Error, PartialShape, Result, Tensor};
use kolo_graph::{Endpoint, NodeId, Nodes, Operation, Output};
use smallvec::SmallVec;

/// The feeds, fetches and targets of a run, by node id.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    pub feeds: SmallVec<[Endpoint; 4]>,
    pub fetches: SmallVec<[Endpoint; 4]>,
    pub targets: SmallVec<[NodeId; 4]>,
}

/// Feeds, fetches and targets packed into numbers, as the key of a plan.
pub(crate) type Signature = SmallVec<[u64; 8]>;

impl Wanted {
    /// `n_known` is the number of nodes in the session's graph; later ones are refused.
    pub fn new<'g>(
        n_known: usize,
        fetches: &[Output<'g>],
        feeds: impl Iterator<Item = Output<'g>>,
        targets: &[Operation<'g>],
    ) -> Result<Wanted> {
        let check = |id: NodeId, what: &dyn Fn() -> String| match id.index() < n_known {
            true => Ok(()),
            false => Err(Error::not_found(format!(
                "'{}' is not in the session's graph; if it was added later, call session.extend(&graph)",
                what()
            ))),
        };
        let endpoint = |output: Output<'_>| {
            if !output.is_valid() {
                output.graph().check()?;
            }
            check(output.endpoint().node, &|| output.name()).map(|()| output.endpoint())
        };
        Ok(Wanted {
            feeds: feeds.map(endpoint).collect::<Result<_>>()?,
            fetches: fetches.iter().map(|output| endpoint(*output)).collect::<Result<_>>()?,
            targets: targets
                .iter()
                .map(|target| check(target.id(), &|| target.name()).map(|()| target.id()))
                .collect::<Result<_>>()?,
        })
    }

    /// By name: tensors as `x:0` (`:0` may be omitted), operations as `x`.
    pub fn named<'a>(
        nodes: &Nodes,
        fetches: &[&str],
        feeds: impl Iterator<Item = &'a str>,
        targets: &[&str],
    ) -> Result<Wanted> {
        Ok(Wanted {
            feeds: feeds.map(|name| nodes.endpoint(name)).collect::<Result<_>>()?,
            fetches: fetches.iter().map(|name| nodes.endpoint(name)).collect::<Result<_>>()?,
            targets: targets.iter().map(|name| nodes.require(name)).collect::<Result<_>>()?,
        })
    }

    pub fn signature(&self) -> Signature {
        const TARGET: u64 = 1 << 63;
        let pack = |at: &Endpoint| u64::from(at.node.0) << 31 | u64::from(at.index);
        let mut signature: Signature = SmallVec::new();
        signature.push((self.feeds.len() as u64) << 32 | self.fetches.len() as u64);
        signature.extend(self.feeds.iter().map(pack));
        signature.extend(self.fetches.iter().map(pack));
        signature.extend(self.targets.iter().map(|id| TARGET | u64::from(id.0)));
        signature
    }

    /// The expected dtypes and shapes of the feeds.
    pub fn feed_infos(&self, nodes: &Nodes) -> Vec<FeedInfo> {
        let of = |&at: &Endpoint| {
            let info = nodes.output(at);
            FeedInfo { name: nodes.endpoint_name(at), dtype: info.dtype, shape: info.shape.clone() }
        };
        self.feeds.iter().map(of).collect()
    }
}

/// The expected dtype and shape of a feed.
#[derive(Clone, Debug)]
pub(crate) struct FeedInfo {
    pub name: String,
    pub dtype: DType,
    pub shape: PartialShape,
}

impl FeedInfo {
    pub fn check(&self, value: &Tensor) -> Result<()> {
        if value.dtype() != self.dtype {
            return Err(Error::invalid_argument(format!(
                "Cannot feed value of type {} for Tensor '{}', which is {}",
                value.dtype(),
                self.name,
                self.dtype
            )));
        }
        if !self.shape.admits(value.shape()) {
            return Err(Error::invalid_argument(format!(
                "Cannot feed value of shape {} for Tensor '{}', which has shape '{}'",
                value.shape(),
                self.name,
                self.shape
            )));
        }
        Ok(())
    }
}

/// Refuses a wrong number of values for a callable.
pub(crate) fn check_n_feeds(n_wanted: usize, n_found: usize) -> Result<()> {
    match n_wanted == n_found {
        true => Ok(()),
        false => Err(Error::invalid_argument(format!("the callable takes {n_wanted} feeds, found {n_found}"))),
    }
}

/// The declared feeds and fetches of a partial run, and which of them were used.
pub(crate) struct Announced {
    pub wanted: Wanted,
    is_taken: Vec<bool>,
    is_fed: Vec<bool>,
}

/// A valid call of a partial run: indices of the declared fetches and feeds.
pub(crate) struct Admitted<'a> {
    pub fetches: Vec<usize>,
    pub feeds: Vec<(usize, &'a Tensor)>,
}

impl Announced {
    pub fn new(wanted: Wanted) -> Announced {
        Announced { is_taken: vec![false; wanted.fetches.len()], is_fed: vec![false; wanted.feeds.len()], wanted }
    }

    /// Checks one call. Each feed and fetch may be used once, and a fetch only when all its feeds were fed.
    pub fn admit<'a>(
        &self,
        nodes: &Nodes,
        infos: &[FeedInfo],
        fetches: &[Output<'_>],
        feeds: &'a [(Output<'_>, Tensor)],
    ) -> Result<Admitted<'a>> {
        let mut admitted = Admitted { fetches: Vec::new(), feeds: Vec::new() };
        for fetch in fetches {
            let at = self.wanted.fetches.iter().position(|at| *at == fetch.endpoint());
            match at.filter(|&at| !self.is_taken[at]) {
                Some(at) => admitted.fetches.push(at),
                None => {
                    return Err(Error::invalid_argument(format!(
                        "the fetch '{}' was not announced when the partial run began, or was taken already",
                        fetch.name()
                    )));
                }
            }
        }
        for (output, value) in feeds {
            let at = self.wanted.feeds.iter().position(|at| *at == output.endpoint());
            let Some(at) = at.filter(|&at| !self.is_fed[at]) else {
                return Err(Error::invalid_argument(format!(
                    "the feed '{}' was not announced when the partial run began, or was fed already",
                    output.name()
                )));
            };
            infos[at].check(value)?;
            admitted.feeds.push((at, value));
        }
        self.check_reachable(nodes, &admitted)?;
        Ok(admitted)
    }

    /// Marks these feeds as fed.
    pub fn feed(&mut self, admitted: &Admitted<'_>) {
        admitted.feeds.iter().for_each(|&(at, _)| self.is_fed[at] = true);
    }

    /// Marks these fetches as taken.
    pub fn take(&mut self, admitted: &Admitted<'_>) {
        admitted.fetches.iter().for_each(|&at| self.is_taken[at] = true);
    }

    /// Every fetch must be computable from the values fed so far.
    fn check_reachable(&self, nodes: &Nodes, admitted: &Admitted<'_>) -> Result<()> {
        let is_fed = |feed: usize| self.is_fed[feed] || admitted.feeds.iter().any(|(at, _)| *at == feed);
        for &fetch in &admitted.fetches {
            let mut seen = HashSet::new();
            let mut stack = vec![self.wanted.fetches[fetch]];
            while let Some(at) = stack.pop() {
                if let Some(feed) = self.wanted.feeds.iter().position(|feed| *feed == at) {
                    if !is_fed(feed) {
                        return Err(Error::invalid_argument(format!(
                            "the fetch '{}' depends on '{}', which has not been fed yet",
                            nodes.endpoint_name(self.wanted.fetches[fetch]),
                            nodes.endpoint_name(at)
                        )));
                    }
                    continue;
                }
                if seen.insert(at.node) {
                    let node = nodes.node(at.node);
                    stack.extend(node.inputs.iter().copied());
                    stack.extend(node.control_inputs.iter().map(|&node| Endpoint { node, index: 0 }));
                }
            }
        }
        Ok(())
    }
}
