//! One capture of a plan or a segment, and the conditions under which it can be replayed.
//!
//! Feeds are copied into fixed buffers. The exception is a value that has the same GPU address in every run, such as
//! a variable's value or the output of another replay: it is read in place. Values that the host reads must be equal
//! to those of the capture. The outputs of a segment stay on the GPU: other nodes share the capture's memory, and the
//! segment is not replayed while one of them still holds it.

use std::collections::HashSet;
use std::sync::Arc;

use kolo_core::{DType, Error, Memory, Result, Shape, Tensor};
use kolo_device::{Address, Recorder, Recording};
use kolo_graph::{Effects, is_variable};
use kolo_ops::{Touched, VariableCell, record_variables};

use crate::capture::limits::Limits;
use crate::compile::part::PartPlan;
use crate::executor::step::Step;

/// The maximum size, in bytes, of a value that the host reads: replays compare it.
const MOST_COMPARED: usize = 64 << 10;
/// Bytes that may be copied for each launch that a segment saves: about what the GPU copies in the time of a launch.
const COPIED_PER_LAUNCH: usize = 4 << 20;

/// Feeds by number; `None` once taken.
pub(super) type Feeds = [Option<Tensor>];
/// The result of a replay: fetches by number, or `None` if the step has to run node by node.
pub(super) type Replayed = Option<Vec<(usize, Tensor)>>;

/// What is known about a plan's feeds when it is captured, and where its fetches should be.
pub(super) struct Wishes<'a> {
    /// Fetches stay on the GPU.
    pub stays: bool,
    /// Whether a feed is at the same GPU address as before.
    pub is_steady: &'a dyn Fn(usize, Address) -> bool,
}

pub(super) struct Replay {
    feeds: Vec<Feed>,
    fetches: Vec<(usize, Fetch)>,
    /// Ordered by the addresses of the cells.
    variables: Vec<Place>,
    pub n_replays: u32,
    /// Declared after the tensors above, which are in its memory.
    recording: Box<dyn Recording>,
}

struct Feed {
    number: usize,
    dtype: DType,
    shape: Shape,
    way: Way,
}

/// How a feed is passed to a replay.
enum Way {
    /// It is copied into this buffer.
    Copied(Tensor),
    /// It is on the GPU, at this address in every run.
    InPlace(Address),
    /// The host read it during the capture; the new value must be equal.
    Read(Tensor),
}

/// How a fetch is returned.
enum Fetch {
    /// A constant on the host.
    Same(Tensor),
    /// Copied to the host.
    ToHost(Tensor),
    /// The capture's own memory, shared with the reader.
    Lent(Tensor),
    /// A copy on the GPU, because the memory is also used for other values.
    Duplicate(Tensor),
    /// The value of a variable that is only read.
    Value(Arc<VariableCell>),
}

/// A variable, and the address that its value must have.
struct Place {
    cell: Arc<VariableCell>,
    is_written: bool,
    address: Address,
    shape: Shape,
}

impl Replay {
    pub fn capture(
        device: &dyn Recorder,
        part: &PartPlan,
        feeds: &mut Feeds,
        wishes: &Wishes<'_>,
        new_step: &dyn Fn() -> Arc<Step>,
        limits: &Limits,
    ) -> Result<Replay> {
        let written = written_variables(part);
        // A variable that is written must keep its address in any case.
        let is_written = |at: Address| {
            let is_it = |cell: &Arc<VariableCell>| {
                cell.with_value(|value| value.is_some_and(|tensor| is_at(device, tensor, at)))
            };
            written.iter().any(is_it)
        };
        let mut places: Vec<Feed> = Vec::new();
        let mut given: Vec<(usize, Tensor)> = Vec::new();
        for feed in &part.feeds {
            let number = feed.feed as usize;
            let value = feeds.get(number).and_then(Option::as_ref);
            let value = value.ok_or_else(|| Error::internal(format!("feed {number} is missing")))?;
            if places.iter().any(|place| place.number == number) {
                return Err(Error::unimplemented(format!("feed {number} is read on the host and on the GPU")));
            }
            let way = match (feed.on_device, is_on_gpu(value)) {
                (true, true) => match device.address_of(value)? {
                    at if (wishes.is_steady)(number, at) || is_written(at) => Way::InPlace(at),
                    _ => Way::Copied(device.duplicate(value, &"a feed of a captured step".into())?),
                },
                (true, false) => Way::Copied(device.copy(value, device.memory())?.0),
                (false, _) => Way::Read(comparable(number, value)?),
            };
            given.push((
                number,
                match &way {
                    Way::Copied(place) => place.clone(),
                    Way::InPlace(_) | Way::Read(_) => value.clone(),
                },
            ));
            places.push(Feed { number, dtype: value.dtype(), shape: value.shape().clone(), way });
        }
        // The variable must be the only holder of memory that an update writes to, so feeds that share it are set
        // aside. Other feeds keep their handles, so that no kernel writes to their memory in place.
        let set_aside = set_aside(device, &places, feeds, &written)?;
        let made = Replay::record(device, part, given, new_step, limits);
        restore(feeds, set_aside);
        let (fetches, touched, recording) = made?;
        let mut variables = Vec::with_capacity(touched.len());
        for Touched { cell, is_written } in touched {
            let (address, shape) = cell.with_value(|value| match value {
                Some(tensor) => Ok((device.address_of(tensor)?, tensor.shape().clone())),
                None => Err(Error::failed_precondition(format!("variable {} has no value", cell.name()))),
            })?;
            variables.push(Place { cell, is_written, address, shape });
        }
        variables.sort_by_key(|place| Arc::as_ptr(&place.cell) as usize);
        let mut given_out = Vec::with_capacity(fetches.len());
        for (number, value) in fetches {
            given_out.push((number, Fetch::of(device, number, value, &variables, &places, wishes.stays)?));
        }
        let replay = Replay { feeds: places, fetches: given_out, variables, n_replays: 0, recording };
        replay.check_worth(wishes.stays)?;
        Ok(replay)
    }

    #[allow(clippy::type_complexity)] // Three results of one call, destructured by its caller.
    fn record(
        device: &dyn Recorder,
        part: &PartPlan,
        given: Vec<(usize, Tensor)>,
        new_step: &dyn Fn() -> Arc<Step>,
        limits: &Limits,
    ) -> Result<(Vec<(usize, Tensor)>, Vec<Touched>, Box<dyn Recording>)> {
        let step = new_step();
        let active = device.begin_recording()?;
        part.constants
            .iter()
            .filter(|constant| is_on_gpu(constant))
            .for_each(|constant| device.keep_in_recording(constant));
        let (fetches, touched) = record_variables(|| {
            let values: Vec<(usize, &Tensor)> = given.iter().map(|(number, tensor)| (*number, tensor)).collect();
            step.feed(&values, false);
            drop(given);
            limits.run(&step);
            step.take_fetched()
        });
        // The step's tensors must be returned to the capture's memory before the capture ends, or is discarded after
        // an error.
        drop(step);
        let fetches = fetches?;
        Ok((fetches, touched, active.end()?))
    }

    /// An error if the copies cost more than the capture saves.
    fn check_worth(&self, stays: bool) -> Result<()> {
        let fed = self.feeds.iter().map(|feed| match &feed.way {
            Way::Copied(place) if stays => place.n_bytes(),
            _ => 0,
        });
        let fetched = self.fetches.iter().map(|(_, fetch)| match fetch {
            Fetch::Duplicate(value) => value.n_bytes(),
            _ => 0,
        });
        let n_bytes: usize = fed.chain(fetched).sum();
        let n_launches = self.n_launches();
        match n_bytes <= n_launches.saturating_mul(COPIED_PER_LAUNCH) {
            true => Ok(()),
            false => Err(Error::unimplemented(format!(
                "{n_bytes} bytes would be copied to save {n_launches} launches, which does not pay"
            ))),
        }
    }

    /// The number of launches that it replaces.
    pub fn n_launches(&self) -> usize {
        self.recording.n_launches()
    }

    /// Whether it was captured for feeds of these types and shapes, at any address.
    fn has_form(&self, feeds: &Feeds) -> bool {
        self.feeds.iter().all(|feed| {
            let value = feeds.get(feed.number).and_then(Option::as_ref);
            value.is_some_and(|value| value.dtype() == feed.dtype && *value.shape() == feed.shape)
        })
    }

    /// Whether it was captured for these feeds.
    pub fn fits(&self, device: &dyn Recorder, feeds: &Feeds) -> bool {
        self.has_form(feeds)
            && self.feeds.iter().all(|feed| match (&feed.way, feeds.get(feed.number).and_then(Option::as_ref)) {
                (_, None) => false,
                (Way::Copied(_), Some(_)) => true,
                (Way::InPlace(at), Some(value)) => is_at(device, value, *at),
                (Way::Read(read), Some(value)) => value == read,
            })
    }

    /// The feeds that should have been read in place but have moved, if everything else fits.
    pub fn moved(&self, device: &dyn Recorder, feeds: &Feeds, into: &mut HashSet<usize>) {
        for feed in self.feeds.iter().filter(|_| self.has_form(feeds)) {
            if let (Way::InPlace(at), Some(Some(value))) = (&feed.way, feeds.get(feed.number))
                && !is_at(device, value, *at)
            {
                into.insert(feed.number);
            }
        }
    }

    pub fn is_for_same(&self, other: &Replay) -> bool {
        let read = |feed: &Feed| match &feed.way {
            Way::Read(value) => Some(value.clone()),
            Way::Copied(_) | Way::InPlace(_) => None,
        };
        let form = |feed: &Feed| (feed.dtype, feed.shape.clone(), read(feed));
        self.feeds.iter().map(form).eq(other.feeds.iter().map(form))
    }

    /// Replays, unless a variable has moved or the outputs of the last replay are still held. Outputs for the host
    /// have arrived when this returns, unless the run was stopped. The feeds must fit.
    pub fn run(&mut self, device: &dyn Recorder, feeds: &mut Feeds, limits: &Limits) -> Result<Replayed> {
        let is_held = |fetch: &mut Fetch| match fetch {
            Fetch::Lent(value) => !value.is_unique(),
            _ => false,
        };
        if self.fetches.iter_mut().any(|(_, fetch)| is_held(fetch)) {
            return Ok(None);
        }
        let copied = self.feeds.iter().filter_map(|feed| match (&feed.way, feeds.get(feed.number)) {
            (Way::Copied(place), Some(Some(value))) => Some((value, place)),
            _ => None,
        });
        device.write_over_all(&copied.collect::<Vec<_>>())?;
        let written: Vec<Arc<VariableCell>> =
            self.variables.iter().filter(|place| place.is_written).map(|place| place.cell.clone()).collect();
        let set_aside = set_aside(device, &self.feeds, feeds, &written)?;
        let mut values: Vec<(usize, Tensor)> = Vec::new();
        let (recording, fetches) = (&self.recording, &self.fetches);
        let given_out: Vec<&Arc<VariableCell>> = fetches.iter().filter_map(|(_, fetch)| fetch.variable()).collect();
        let done = with_all(device, &self.variables, &mut |cell, value| match cell {
            Some(cell) if given_out.iter().any(|wanted| Arc::ptr_eq(wanted, cell)) => {
                values.extend(value.map(|value| (Arc::as_ptr(cell) as usize, value.clone())));
                Ok(())
            }
            Some(_) => Ok(()),
            None => recording.replay(),
        });
        if !matches!(done, Ok(true)) {
            restore(feeds, set_aside);
            return done.map(|_| None);
        }
        let mut events = Vec::new();
        let mut fetched = Vec::with_capacity(fetches.len());
        for (number, fetch) in fetches {
            let value = match fetch {
                Fetch::Same(value) | Fetch::Lent(value) => value.clone(),
                Fetch::ToHost(value) => {
                    let (copy, event) = device.copy(value, Memory::Host)?;
                    events.extend(event);
                    copy
                }
                Fetch::Duplicate(value) => device.duplicate(value, &"a value of a captured step".into())?,
                Fetch::Value(cell) => {
                    let value = values.iter().find(|(of, _)| *of == Arc::as_ptr(cell) as usize);
                    let missing = || Error::internal(format!("variable {} was not looked at", cell.name()));
                    value.ok_or_else(missing)?.1.clone()
                }
            };
            fetched.push((*number, value));
        }
        for event in &events {
            if let Err(stopped) = limits.wait(&**event, "the GPU, which replays a captured step") {
                // The replay still writes to these tensors, so they are kept until it is done.
                if let Some(last) = events.last() {
                    device.when_done(last.clone(), Box::new(move |_| drop(fetched)));
                }
                return Err(stopped);
            }
        }
        Ok(Some(fetched))
    }
}

impl Fetch {
    fn variable(&self) -> Option<&Arc<VariableCell>> {
        match self {
            Fetch::Value(cell) => Some(cell),
            _ => None,
        }
    }

    fn of(
        device: &dyn Recorder,
        number: usize,
        mut value: Tensor,
        variables: &[Place],
        feeds: &[Feed],
        stays: bool,
    ) -> Result<Fetch> {
        if !is_on_gpu(&value) {
            return Ok(Fetch::Same(value));
        }
        let at = device.address_of(&value)?;
        let variable = variables.iter().find(|place| place.address == at);
        if let Some(place) = variable
            && (place.is_written || !stays)
        {
            return Err(Error::unimplemented(format!(
                "fetch {number} is the own memory of variable {}",
                place.cell.name()
            )));
        }
        let is_feed = feeds.iter().any(|feed| match &feed.way {
            Way::InPlace(address) => *address == at,
            Way::Copied(_) | Way::Read(_) => false,
        });
        Ok(match variable {
            _ if !stays => Fetch::ToHost(value),
            Some(place) if place.shape == *value.shape() => Fetch::Value(place.cell.clone()),
            _ if is_feed || !value.is_unique() => Fetch::Duplicate(value),
            _ => Fetch::Lent(value),
        })
    }
}

/// The variables that nodes of a part write to, as far as this is known before it runs.
fn written_variables(part: &PartPlan) -> Vec<Arc<VariableCell>> {
    let has_updates = part.nodes.iter().any(|node| node.node.def.effects == Effects::Writes);
    let sources = part.nodes.iter().filter(|node| has_updates && is_variable(&node.node));
    sources
        .filter_map(|node| {
            let attr = |name: &str| node.node.attrs.str(name).unwrap_or_default();
            let name = if attr("shared_name").is_empty() { &*node.node.name } else { attr("shared_name") };
            part.unit.resources.lookup::<VariableCell>(attr("container"), name).ok().flatten()
        })
        .collect()
}

/// Removes the feeds that are the values of these variables, and returns which variables they belong to.
fn set_aside(
    device: &dyn Recorder,
    places: &[Feed],
    feeds: &mut Feeds,
    variables: &[Arc<VariableCell>],
) -> Result<Vec<(usize, Arc<VariableCell>, Shape)>> {
    let mut taken = Vec::new();
    for feed in places {
        let Way::InPlace(at) = feed.way else { continue };
        let holds =
            |cell: &&Arc<VariableCell>| cell.with_value(|value| value.is_some_and(|tensor| is_at(device, tensor, at)));
        if let Some(cell) = variables.iter().find(holds)
            && let Some(value) = feeds.get_mut(feed.number).and_then(Option::take)
        {
            taken.push((feed.number, cell.clone(), value.shape().clone()));
        }
    }
    Ok(taken)
}

/// Restores feeds that were set aside, for a step that runs node by node after all.
fn restore(feeds: &mut Feeds, taken: Vec<(usize, Arc<VariableCell>, Shape)>) {
    for (number, cell, shape) in taken {
        let value = cell.with_value(|value| value.cloned());
        if let (Some(place), Some(value)) = (feeds.get_mut(number), value) {
            *place = value.reshaped(shape).ok();
        }
    }
}

/// A value that the host reads, if replays can compare it: small, numeric and in host memory.
fn comparable(number: usize, value: &Tensor) -> Result<Tensor> {
    match value.dtype().size() {
        Some(_) if value.n_bytes() <= MOST_COMPARED && !is_on_gpu(value) => Ok(value.clone()),
        _ => Err(Error::unimplemented(format!("value {number} is read on the host, and not a few numbers"))),
    }
}

fn is_at(device: &dyn Recorder, value: &Tensor, at: Address) -> bool {
    is_on_gpu(value) && device.address_of(value).is_ok_and(|address| address == at)
}

pub(super) fn is_on_gpu(tensor: &Tensor) -> bool {
    !tensor.memory().is_host()
}

/// Calls `f` with each variable and its value, and then with `None`, while holding all of their locks. Does so only
/// if each variable has kept its address and nobody else holds a value that is written; returns whether it did. A
/// value that is only read may be shared: an initial value often is, with the constant it came from.
fn with_all(device: &dyn Recorder, variables: &[Place], f: &mut WithVariable<'_>) -> Result<bool> {
    let Some((place, rest)) = variables.split_first() else { return f(None, None).map(|()| true) };
    place.cell.with_value(|value| {
        let Some(tensor) = value else { return Ok(false) };
        let is_there = device.address_of(tensor)? == place.address && *tensor.shape() == place.shape;
        match is_there && (!place.is_written || tensor.is_unique()) {
            true => {
                f(Some(&place.cell), Some(tensor))?;
                with_all(device, rest, f)
            }
            false => Ok(false),
        }
    })
}

/// The callback of [`with_all`].
type WithVariable<'a> = dyn FnMut(Option<&Arc<VariableCell>>, Option<&Tensor>) -> Result<()> + 'a;
