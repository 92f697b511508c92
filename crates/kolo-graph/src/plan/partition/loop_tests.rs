//! Loops over several devices compute what they compute on one, and nothing waits for ever. The partitions are run by a
//! small interpreter of tagged tokens, written from the executor's rules and sharing no code with planning.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::testing::{Kernels, devices, graph, registry};
use crate::{Graph, Operation, Output, PlaceOptions, Request, place, prune};

/// Frames and iterations, outermost first.
type Tag = Vec<(String, usize)>;
/// A value, or dead.
type Token = Option<i64>;

#[derive(Default)]
struct Arrived {
    data: BTreeMap<usize, Token>,
    control: Vec<Token>,
    fired: bool,
}

/// A node of a partition that may run, and whether one of its inputs is dead.
struct Ready {
    p: usize,
    id: NodeId,
    tag: Tag,
    inputs: BTreeMap<usize, Token>,
    dead: bool,
}

#[derive(Default)]
struct Machine {
    arrived: HashMap<(usize, NodeId, Tag), Arrived>,
    ready: VecDeque<Ready>,
    sent: HashMap<(String, Tag), Token>,
    waiting: HashMap<(String, Tag), (usize, NodeId)>,
    /// Loop constants by partition and frame instance, and the iterations that have begun.
    constants: HashMap<(usize, Tag, String), Vec<(NodeId, Token)>>,
    begun: HashSet<(usize, Tag)>,
    dead_exits: HashSet<(usize, NodeId, Tag, String)>,
    live_exits: HashSet<(usize, NodeId, Tag)>,
    fetched: BTreeMap<usize, i64>,
}

/// Runs partitions to the end; panics if a receive is left waiting.
fn run(parts: &[Partition], values: &HashMap<&str, i64>) -> BTreeMap<usize, i64> {
    let mut machine = Machine::default();
    for (p, part) in parts.iter().enumerate() {
        for (id, node) in part.nodes.iter().filter(|(_, node)| node.inputs.is_empty()) {
            if node.control_inputs.is_empty() {
                machine.ready.push_back(Ready { p, id, tag: vec![], inputs: BTreeMap::new(), dead: false });
            }
        }
    }
    let mut n_fired = 0;
    loop {
        while let Some(ready) = machine.ready.pop_front() {
            n_fired += 1;
            assert!(n_fired < 100_000, "it never ends");
            machine.fire(parts, ready, values);
        }
        if !machine.end_a_frame(parts) {
            break;
        }
    }
    assert!(machine.waiting.is_empty(), "left waiting: {:?}", machine.waiting.keys());
    assert!(machine.sent.is_empty(), "never received: {:?}", machine.sent.keys());
    machine.fetched
}

impl Machine {
    fn fire(&mut self, parts: &[Partition], ready: Ready, values: &HashMap<&str, i64>) {
        let Ready { p, id, tag, inputs, dead } = ready;
        let node = parts[p].nodes.node(id).clone();
        let input = |i: usize| inputs.get(&i).copied().flatten();
        let live = |value: i64| if dead { None } else { Some(value) };
        match node.op() {
            "Source" => self.give(parts, p, id, &tag, &[live(values[&*node.name])]),
            "Const" => self.give(parts, p, id, &tag, &[live(0)]),
            "Identity" | "LoopCond" | "Neg" => self.give(parts, p, id, &tag, &[input(0)]),
            "Add" => {
                let sum = input(0).zip(input(1)).map(|(x, y)| x + y);
                self.give(parts, p, id, &tag, &[sum.filter(|_| !dead)]);
            }
            "Less" => {
                let less = input(0).zip(input(1)).map(|(x, y)| i64::from(x < y));
                self.give(parts, p, id, &tag, &[less.filter(|_| !dead)]);
            }
            "Switch" => {
                let taken = |side: i64| input(0).filter(|_| !dead && input(1) == Some(side));
                self.give(parts, p, id, &tag, &[taken(0), taken(1)]);
            }
            "Merge" => {
                let value = inputs.iter().find_map(|(i, token)| token.map(|value| (value, *i as i64)));
                self.give(parts, p, id, &tag, &[value.map(|(value, _)| value), value.map(|(_, i)| i)]);
            }
            "Enter" => {
                let frame = node.attrs.str("frame_name").unwrap().to_owned();
                let token = input(0).filter(|_| !dead);
                let mut inside = tag.clone();
                inside.push((frame.clone(), 0));
                if node.attrs.bool("is_constant").unwrap() {
                    self.constants.entry((p, tag.clone(), frame.clone())).or_default().push((id, token));
                    let begun: Vec<Tag> = self.iterations(p, &tag, &frame);
                    for inside in begun.iter().filter(|begun| **begun != inside) {
                        self.give(parts, p, id, inside, &[token]);
                    }
                }
                self.begin(parts, p, &inside, Some(id));
                self.give(parts, p, id, &inside, &[token]);
            }
            "NextIteration" => {
                if let Some(value) = input(0).filter(|_| !dead) {
                    let mut next = tag.clone();
                    next.last_mut().unwrap().1 += 1;
                    self.begin(parts, p, &next, None);
                    self.give(parts, p, id, &next, &[Some(value)]);
                }
            }
            "Exit" => {
                let (frame, _) = tag.last().unwrap().clone();
                let outside = tag[..tag.len() - 1].to_vec();
                match input(0).filter(|_| !dead) {
                    Some(value) => {
                        self.live_exits.insert((p, id, outside.clone()));
                        self.give(parts, p, id, &outside, &[Some(value)]);
                    }
                    None => {
                        self.dead_exits.insert((p, id, outside, frame));
                    }
                }
            }
            "_Send" => {
                let key = (node.attrs.str("tensor_name").unwrap().to_owned(), tag.clone());
                let token = input(0).filter(|_| !dead);
                match self.waiting.remove(&key) {
                    Some((p, id)) => self.give(parts, p, id, &tag, &[token]),
                    None => assert!(self.sent.insert(key, token).is_none(), "sent twice"),
                }
            }
            "_Recv" => {
                let key = (node.attrs.str("tensor_name").unwrap().to_owned(), tag.clone());
                match self.sent.remove(&key) {
                    Some(token) => self.give(parts, p, id, &tag, &[token]),
                    None => assert!(self.waiting.insert(key, (p, id)).is_none(), "received twice"),
                }
            }
            op => panic!("{op} is not known here"),
        }
    }

    fn iterations(&self, p: usize, outside: &Tag, frame: &str) -> Vec<Tag> {
        let inside =
            |tag: &Tag| tag.len() == outside.len() + 1 && tag.starts_with(outside) && tag.last().unwrap().0 == frame;
        let begun = self.begun.iter().filter(|(q, tag)| *q == p && inside(tag));
        begun.map(|(_, tag)| tag.clone()).collect()
    }

    /// An iteration begins: loop constants that are known already go to it.
    fn begin(&mut self, parts: &[Partition], p: usize, tag: &Tag, entering: Option<NodeId>) {
        if !self.begun.insert((p, tag.clone())) {
            return;
        }
        let (frame, _) = tag.last().unwrap().clone();
        let key = (p, tag[..tag.len() - 1].to_vec(), frame);
        for (id, token) in self.constants.get(&key).cloned().unwrap_or_default() {
            if entering != Some(id) {
                self.give(parts, p, id, tag, &[token]);
            }
        }
    }

    /// Hands a node's outputs to its consumers.
    fn give(&mut self, parts: &[Partition], p: usize, from: NodeId, tag: &Tag, outputs: &[Token]) {
        let part = &parts[p];
        for (fetch, at) in part.fetches.iter().filter(|(_, at)| at.node == from) {
            if let Some(value) = outputs[at.index as usize] {
                self.fetched.insert(*fetch, value);
            }
        }
        // A control edge is dead only if the node did not run.
        let dead = outputs.iter().all(Option::is_none);
        for (id, node) in part.nodes.iter() {
            for (i, _) in node.inputs.iter().enumerate().filter(|(_, at)| at.node == from) {
                let token = outputs[node.inputs[i].index as usize];
                self.arrive(part, p, id, tag, |arrived| assert!(arrived.data.insert(i, token).is_none()));
            }
            if node.control_inputs.contains(&from) {
                self.arrive(part, p, id, tag, |arrived| arrived.control.push(if dead { None } else { Some(0) }));
            }
        }
    }

    fn arrive(&mut self, part: &Partition, p: usize, id: NodeId, tag: &Tag, put: impl FnOnce(&mut Arrived)) {
        let node = part.nodes.node(id);
        let arrived = self.arrived.entry((p, id, tag.clone())).or_default();
        put(arrived);
        let all_control = arrived.control.len() == node.control_inputs.len();
        let is_merge = node.def.flow == Flow::Merge;
        let is_ready = match is_merge {
            false => arrived.data.len() == node.inputs.len(),
            true => {
                let is_back = |i: usize| part.nodes.node(node.inputs[i].node).def.flow == Flow::NextIteration;
                let later = tag.last().is_some_and(|(_, iteration)| *iteration > 0);
                let due = (0..node.inputs.len()).filter(|&i| is_back(i) == later).count();
                arrived.data.values().any(Option::is_some) || arrived.data.len() == due
            }
        };
        if is_ready && all_control && !std::mem::replace(&mut arrived.fired, true) {
            let dead_data = arrived.data.values().any(Option::is_none) && !is_merge;
            let dead = dead_data || arrived.control.iter().any(Option::is_none);
            self.ready.push_back(Ready { p, id, tag: tag.clone(), inputs: arrived.data.clone(), dead });
        }
    }

    /// When nothing moves: a frame that waits for nothing has ended, and exits that never lived give dead.
    fn end_a_frame(&mut self, parts: &[Partition]) -> bool {
        let blocked = |p: usize, outside: &Tag, frame: &str| {
            let inside =
                |tag: &Tag| tag.len() > outside.len() && tag.starts_with(outside) && tag[outside.len()].0 == frame;
            self.waiting.iter().any(|((_, tag), (q, _))| *q == p && inside(tag))
        };
        let ended = self.dead_exits.iter().find(|(p, _, outside, frame)| !blocked(*p, outside, frame)).cloned();
        let Some(exit @ (p, id, _, _)) = ended else { return false };
        self.dead_exits.remove(&exit);
        if !self.live_exits.contains(&(p, id, exit.2.clone())) {
            self.give(parts, p, id, &exit.2, &[None]);
        }
        true
    }
}

/// Describes nodes, each where `pin` says.
struct Describe<'g> {
    g: &'g Graph,
    pin: &'g dyn Fn(usize) -> String,
    count: Cell<usize>,
}

impl<'g> Describe<'g> {
    fn next_pin(&self) -> String {
        self.count.set(self.count.get() + 1);
        (self.pin)(self.count.get())
    }

    fn op(&self, name: &str, op: &str, inputs: &[Output<'g>]) -> Operation<'g> {
        self.g.device(&self.next_pin(), || self.g.op(op).name(name).inputs(inputs.iter().copied()).build())
    }

    fn enter(&self, name: &str, frame: &str, x: Output<'g>, constant: bool) -> Output<'g> {
        let enter = || self.g.op("Enter").name(name).input(x).attr("frame_name", frame).attr("is_constant", constant);
        self.g.device(&self.next_pin(), || enter().out())
    }
}

/// `i = 1; while i < limit { bound = i + i; j = i; while j < bound { j = j + one }; i = j }`: doubles until the limit.
fn nested_loop(pin: &dyn Fn(usize) -> String) -> Graph {
    let g = graph();
    {
        let d = Describe { g: &g, pin, count: Cell::new(0) };
        let one = d.op("one", "Source", &[]).output(0);
        let limit = d.op("limit", "Source", &[]).output(0);
        let i0 = d.enter("i0", "f", one, false);
        let (limit, one) = (d.enter("limit_f", "f", limit, true), d.enter("one_f", "f", one, true));
        let i = d.op("i", "Merge", &[i0, i0]);
        let less = d.op("less", "Less", &[i.output(0), limit]).output(0);
        let cond = d.op("cond", "LoopCond", &[less]).output(0);
        let switch = d.op("switch", "Switch", &[i.output(0), cond]);
        let bound = d.op("bound", "Add", &[switch.output(1), switch.output(1)]).output(0);
        let j0 = d.enter("j0", "g", switch.output(1), false);
        let (bound, one) = (d.enter("bound_g", "g", bound, true), d.enter("one_g", "g", one, true));
        let j = d.op("j", "Merge", &[j0, j0]);
        let less = d.op("less_g", "Less", &[j.output(0), bound]).output(0);
        let cond = d.op("cond_g", "LoopCond", &[less]).output(0);
        let inner = d.op("switch_g", "Switch", &[j.output(0), cond]);
        let add = d.op("add", "Add", &[inner.output(1), one]).output(0);
        let next = d.op("next_g", "NextIteration", &[add]).output(0);
        g.close_loop(j.id(), 1, next.endpoint()).unwrap();
        let end = d.op("exit_g", "Exit", &[inner.output(0)]).output(0);
        let next = d.op("next", "NextIteration", &[end]).output(0);
        g.close_loop(i.id(), 1, next.endpoint()).unwrap();
        d.op("exit", "Exit", &[switch.output(0)]);
    }
    g.check().unwrap();
    g
}

fn check(pin: &dyn Fn(usize) -> String, n_devices: usize, limit: i64, by_task: bool) {
    let g = nested_loop(pin);
    let mut nodes = g.snapshot();
    let on = devices(&(0..n_devices).map(|i| format!("/cpu:{i}")).collect::<Vec<_>>().join(" "));
    let mut counter = 0;
    let mut fresh = || {
        counter += 1;
        counter
    };
    let mut plan = |nodes: &Nodes, options: &PartitionOptions<'_>| {
        // A worker runs all of what its master sends.
        let all = nodes.iter().map(|(id, _)| id).filter(|_| options.loops == LoopControl::Present);
        let fetches = vec![nodes.endpoint("exit").unwrap()];
        let request = Request { fetches, targets: all.collect(), ..Request::default() };
        let pruned = prune(nodes, &request).unwrap();
        let placed = place(nodes, &pruned.nodes, &on, &Kernels, &HashMap::new(), &PlaceOptions::default()).unwrap();
        partition(&placed, &pruned, registry(), options, &mut fresh).unwrap()
    };
    let mut options = PartitionOptions::default();
    if by_task {
        // As a master and then a worker do it.
        let task = PartitionOptions { granularity: Granularity::Task, ..options };
        nodes = plan(&nodes, &task).remove(0).nodes;
        options.loops = LoopControl::Present;
    }
    let parts = plan(&nodes, &options);
    let values = HashMap::from([("one", 1), ("limit", limit)]);
    let expect = std::iter::successors(Some(1), |i| Some(2 * i)).find(|i| *i >= limit).unwrap();
    assert_eq!(run(&parts, &values), BTreeMap::from([(0, expect)]));
}

#[test]
fn one_device_computes_the_loop() {
    check(&|_| String::new(), 1, 20, false);
    check(&|_| String::new(), 1, 0, false);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_spread_of_a_nested_loop_computes_the_same(
        pins in proptest::collection::vec(0usize..3, 32),
        limit in prop::sample::select(vec![0i64, 2, 5]),
        by_task in any::<bool>(),
    ) {
        check(&|i| format!("/cpu:{}", pins[i % pins.len()]), 3, limit, by_task);
    }
}
