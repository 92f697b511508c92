//! One rank's end of a group of GPUs: what it enqueues for each exchange.

use std::ffi::c_void;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use kolo_core::{DType, Error, Result, Shape, Tensor};
use parking_lot::Mutex;

use super::communicator::Communicator;
use super::library::{
    BYTES, Comm, IN_PROGRESS, Nccl, SUCCESS, Status, UNIQUE_ID_BYTES, UniqueId, data_type, nccl, reduction,
};
use crate::cpu::reduce::{ReduceOp, check_reducible};
use crate::cuda::capture::{join_before_end, keep};
use crate::cuda::check;
use crate::cuda::device::CudaDevice;
use crate::cuda::launch::{Args, Grid};
use crate::cuda::program::{ProgramKey, c_type};
use crate::cuda::stream::{Mark, Streams};
use crate::{Device, DeviceRanks, Event as _, MeetingId, RankDevice, RankOnDevice};

/// How much of a vector is exchanged at a time. The memory for what others send is as large.
const MOST_BYTES: usize = 32 << 20;

/// Tensors that are exchanged together begin at multiples of this, and shares are multiples of it.
const ALIGNMENT: usize = 256;

/// How long an exchange that is under way may take when its device is closed.
const LAST_EXCHANGE: Duration = Duration::from_secs(5);

/// The most ranks for which a kernel's loop over them is written out.
const MOST_UNROLLED: usize = 16;

const SOURCE: &str = include_str!("reduce.cu");

pub(in crate::cuda) struct NcclRanks {
    rank: usize,
    n_ranks: usize,
    deterministic: bool,
    /// `None` for a group of one, which has nobody to exchange anything with.
    comm: Option<Arc<Communicator>>,
    /// Where others' shares arrive.
    scratch: Mutex<Option<Tensor>>,
    under_way: Mutex<Vec<UnderWay>>,
    stream: Arc<CudaStream>,
    streams: Arc<Streams>,
}

/// An exchange that nobody has waited for yet.
struct UnderWay {
    /// Where the tensors begin that it gives.
    at: Vec<u64>,
    after: Arc<Mark>,
    /// The memory that it writes to, which must not be used for something else if its step fails.
    kept: Vec<Tensor>,
}

impl RankDevice for CudaDevice {
    fn hardware(&self) -> Result<String> {
        nccl()?;
        Ok(hardware_of(self.gpu()))
    }

    fn new_meeting(&self) -> Result<MeetingId> {
        let nccl = nccl()?;
        self.bind()?;
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: the library writes as many bytes as the type has.
        match unsafe { (nccl.get_unique_id)(&mut id) } {
            SUCCESS => Ok(id.0.to_vec()),
            bad => Err(Error::unavailable(format!("NCCL: {}", nccl.describe(bad, std::ptr::null_mut())))),
        }
    }

    fn meet(&self, meeting: &MeetingId, place: &RankOnDevice<'_>) -> Result<Arc<dyn DeviceRanks>> {
        let streams = self.streams().clone();
        let comm = match place.n_ranks {
            1 => None,
            _ => {
                let id = meeting.first_chunk().ok_or_else(|| Error::internal("this is no identifier of NCCL's"))?;
                Some(Arc::new(Communicator::meet(nccl()?, streams.clone(), UniqueId(*id), place)?))
            }
        };
        let ranks = Arc::new(NcclRanks {
            rank: place.rank,
            n_ranks: place.n_ranks,
            deterministic: place.deterministic,
            comm,
            scratch: Mutex::default(),
            under_way: Mutex::default(),
            stream: check("making a stream", streams.context.new_stream())?,
            streams,
        });
        self.keep_ranks(ranks.clone());
        Ok(ranks)
    }
}

impl DeviceRanks for NcclRanks {
    fn all_reduce(&self, device: &dyn Device, mut tensors: Vec<Tensor>, op: ReduceOp) -> Result<Vec<Tensor>> {
        let Some(dtype) = tensors.first().map(Tensor::dtype) else { return Ok(tensors) };
        check_reducible(dtype)?;
        let (device, n_bytes) = (CudaDevice::of(device)?, tensors.iter().map(Tensor::n_bytes).sum::<usize>());
        let Some(comm) = self.comm.as_ref().filter(|_| n_bytes > 0) else { return Ok(tensors) };
        let is_own = tensors.len() == 1 && tensors[0].is_unique();
        let flat = if is_own && n_bytes.is_multiple_of(self.n_ranks * ALIGNMENT) {
            tensors[0].clone().reshaped(Shape::new(&[tensors[0].n_elements()])?)?
        } else {
            let (flat, views) = self.pack(device, dtype, &tensors)?;
            tensors = views;
            flat
        };
        self.beside(device, comm, &tensors, || match (self.deterministic, data_type(dtype)) {
            (false, Some(number)) => {
                let at = device.address(&flat)? as *mut c_void;
                let (n, op, stream) = (flat.n_elements(), reduction(op), self.stream.cu_stream());
                // SAFETY: as for all calls of NCCL below: both spans are in tensors of this device, which live until the compute
                // stream has waited for this one (see `beside`), and their lengths are those of the tensors.
                comm.group(|nccl, comm| good(unsafe { (nccl.all_reduce)(at, at, n, number, op, comm, stream) }))
            }
            _ => self.reduce_in_tree(device, comm, &flat, op),
        })?;
        Ok(tensors)
    }

    fn broadcast(&self, device: &dyn Device, tensors: Vec<Tensor>, root: usize) -> Result<Vec<Tensor>> {
        let device = CudaDevice::of(device)?;
        let Some(comm) = &self.comm else { return Ok(tensors) };
        let is_root = root == self.rank;
        let own = |mut tensor: Tensor| match is_root || tensor.is_unique() {
            true => Ok(tensor),
            false => device.allocate_tensor(tensor.dtype(), tensor.shape().clone(), &tag()),
        };
        let tensors = tensors.into_iter().map(own).collect::<Result<Vec<Tensor>>>()?;
        let places = places(device, &tensors)?;
        self.at_once(device, comm, &tensors, || {
            comm.group(|nccl, comm| {
                for (at, n) in places {
                    let (at, root, stream) = (at as *mut c_void, root as i32, self.stream.cu_stream());
                    // SAFETY: see `all_reduce`.
                    good(unsafe { (nccl.broadcast)(at, at, n, BYTES, root, comm, stream) })?;
                }
                Ok(())
            })
        })?;
        Ok(tensors)
    }

    fn reduce_scatter(&self, device: &dyn Device, tensor: Tensor, op: ReduceOp) -> Result<Tensor> {
        let (device, dtype) = (CudaDevice::of(device)?, tensor.dtype());
        check_reducible(dtype)?;
        let Some(comm) = &self.comm else { return Ok(tensor) };
        let shape = self.shape_of_share(&tensor)?;
        let share = device.allocate_tensor(dtype, shape, &tag())?;
        let n = share.n_elements();
        if n == 0 {
            return Ok(share);
        }
        self.at_once(device, comm, &[share.clone(), tensor.clone()], || {
            match (self.deterministic, data_type(dtype)) {
                (false, Some(number)) => {
                    let (from, to) =
                        (device.address(&tensor)? as *const c_void, device.address(&share)? as *mut c_void);
                    let (op, stream) = (reduction(op), self.stream.cu_stream());
                    comm.group(|nccl, comm| {
                        // SAFETY: see `all_reduce`.
                        good(unsafe { (nccl.reduce_scatter)(from, to, n, number, op, comm, stream) })
                    })
                }
                _ => {
                    let size = dtype.size().unwrap_or(1);
                    let from = tensor.clone().reshaped(Shape::new(&[tensor.n_elements()])?)?;
                    let to = share.clone().reshaped(Shape::new(&[n])?)?;
                    let most = (MOST_BYTES / self.n_ranks / ALIGNMENT).max(1) * ALIGNMENT / size;
                    for start in (0..n).step_by(most) {
                        let piece = start..n.min(start + most);
                        let share_of = |rank: usize| from.rows(rank * n + piece.start, piece.len());
                        self.reduce_share(device, comm, &share_of, &to.rows(piece.start, piece.len())?, op)?;
                    }
                    Ok(())
                }
            }
        })?;
        Ok(share)
    }

    fn all_gather(&self, device: &dyn Device, tensor: Tensor) -> Result<Tensor> {
        let device = CudaDevice::of(device)?;
        let Some(comm) = &self.comm else { return Ok(tensor) };
        let mut dims = tensor.shape().dims().to_vec();
        let rows = dims.first_mut().ok_or_else(|| Error::invalid_argument("a scalar has no rows to gather"))?;
        *rows *= self.n_ranks;
        let all = device.allocate_tensor(tensor.dtype(), Shape::new(&dims)?, &tag())?;
        if tensor.n_bytes() > 0 {
            let (from, to) = (device.address(&tensor)?, device.address(&all)?);
            self.at_once(device, comm, &[all.clone(), tensor.clone()], || {
                self.gather(comm, from, to, tensor.n_bytes())
            })?;
        }
        Ok(all)
    }

    fn all_to_all(&self, device: &dyn Device, tensor: Tensor) -> Result<Tensor> {
        let device = CudaDevice::of(device)?;
        let Some(comm) = &self.comm else { return Ok(tensor) };
        self.shape_of_share(&tensor)?;
        let all = device.allocate_tensor(tensor.dtype(), tensor.shape().clone(), &tag())?;
        let n = tensor.n_bytes() / self.n_ranks;
        if n > 0 {
            let (from, to) = (device.address(&tensor)?, device.address(&all)?);
            self.at_once(device, comm, &[all.clone(), tensor.clone()], || {
                comm.group(|nccl, comm| {
                    for rank in 0..self.n_ranks {
                        let at = (rank * n) as u64;
                        self.swap(nccl, comm, rank, from + at, to + at, n)?;
                    }
                    Ok(())
                })
            })?;
        }
        Ok(all)
    }

    fn await_exchange(&self, device: &dyn Device, tensor: &Tensor) -> Result<()> {
        let device = CudaDevice::of(device)?;
        if self.comm.is_none() || tensor.n_bytes() == 0 {
            return Ok(());
        }
        let at = device.address(tensor)?;
        let found = {
            let mut under_way = self.under_way.lock();
            let found = under_way.iter().position(|exchange| exchange.at.contains(&at));
            found.map(|i| under_way.swap_remove(i))
        };
        match found {
            Some(exchange) => self.streams.wait_on(device.compute_stream(), &exchange.after),
            None => Ok(()),
        }
    }

    fn abort(&self, why: Error) {
        if let Some(comm) = &self.comm {
            comm.abort(why);
        }
    }

    fn ended(&self) -> Option<Error> {
        self.comm.as_ref().and_then(|comm| comm.ended())
    }
}

impl NcclRanks {
    /// Runs `enqueue` on the group's stream, after what is on the compute stream now. The tensors that it writes to are `given`.
    fn beside(
        &self,
        device: &CudaDevice,
        comm: &Arc<Communicator>,
        given: &[Tensor],
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = self.streams.mark_on(device.compute_stream(), None)?;
        self.streams.wait(&self.stream, &before)?;
        enqueue()?;
        let after = Arc::new(self.streams.mark(&self.stream, None)?);
        let is_capturing = device.is_capturing();
        join_before_end(&after, comm.clone());
        let at = given.iter().filter(|tensor| tensor.n_bytes() > 0).map(|tensor| device.address(tensor));
        // In a capture nothing is computed now, and its memory is returned when it ends.
        let kept = if is_capturing { Vec::new() } else { given.to_vec() };
        let mut under_way = self.under_way.lock();
        let at = at.collect::<Result<Vec<u64>>>()?;
        // A step that failed has left its exchanges, whose memory is free when they are done; so has a capture that waits for them at
        // its end, which keeps none, and whose events cannot be asked.
        under_way.retain(|other| {
            let is_done = !other.kept.is_empty() && other.after.is_done();
            !is_done && !other.at.iter().any(|address| at.contains(address))
        });
        under_way.push(UnderWay { at, after, kept });
        Ok(())
    }

    /// As [`NcclRanks::beside`]; kernels that are enqueued from now on wait for it. `involved` is all that it reads and writes.
    fn at_once(
        &self,
        device: &CudaDevice,
        comm: &Arc<Communicator>,
        involved: &[Tensor],
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.beside(device, comm, involved, enqueue)?;
        match involved.iter().find(|tensor| tensor.n_bytes() > 0) {
            Some(tensor) => self.await_exchange(device, tensor),
            None => Ok(()),
        }
    }

    /// Copies tensors side by side; returns all of that memory as a vector, and the tensors in it.
    fn pack(&self, device: &CudaDevice, dtype: DType, tensors: &[Tensor]) -> Result<(Tensor, Vec<Tensor>)> {
        let size = dtype.size().ok_or_else(|| Error::internal(format!("{dtype} has no fixed size")))?;
        let alignment = ALIGNMENT / size;
        let mut starts = Vec::with_capacity(tensors.len());
        let mut n = 0;
        for tensor in tensors {
            starts.push(n);
            n += tensor.n_elements().next_multiple_of(alignment);
        }
        let shape = Shape::new(&[n.next_multiple_of(alignment * self.n_ranks)])?;
        let flat = device.allocate_tensor(dtype, shape, &tag())?;
        let view = |(tensor, start): (&Tensor, &usize)| {
            flat.rows(*start, tensor.n_elements())?.reshaped(tensor.shape().clone())
        };
        let views = tensors.iter().zip(&starts).map(view).collect::<Result<Vec<Tensor>>>()?;
        let pairs: Vec<(&Tensor, &Tensor)> =
            tensors.iter().zip(&views).filter(|(from, _)| from.n_bytes() > 0).collect();
        device.launch_copies(&pairs)?;
        Ok((flat, views))
    }

    /// Combines a vector of all ranks, in place. The ranks divide its bytes.
    fn reduce_in_tree(&self, device: &CudaDevice, comm: &Communicator, flat: &Tensor, op: ReduceOp) -> Result<()> {
        let (n, size) = (flat.n_elements(), flat.dtype().size().unwrap_or(1));
        let least = self.n_ranks * ALIGNMENT;
        let most = (MOST_BYTES / least).max(1) * least / size;
        for start in (0..n).step_by(most) {
            let piece = flat.rows(start, most.min(n - start))?;
            let share = piece.n_elements() / self.n_ranks;
            let of = |rank: usize| piece.rows(rank * share, share);
            self.reduce_share(device, comm, &of, &of(self.rank)?, op)?;
            let (own, all) = (device.address(&of(self.rank)?)?, device.address(&piece)?);
            self.gather(comm, own, all, share * size)?;
        }
        Ok(())
    }

    /// Combines what all ranks have for this rank's share into `out`. `share_of` is what this rank has for each share.
    fn reduce_share(
        &self,
        device: &CudaDevice,
        comm: &Communicator,
        share_of: &dyn Fn(usize) -> Result<Tensor>,
        out: &Tensor,
        op: ReduceOp,
    ) -> Result<()> {
        let n_bytes = out.n_bytes();
        let scratch = self.scratch(device, n_bytes * self.n_ranks)?;
        let arriving = device.address(&scratch)?;
        let others = || (0..self.n_ranks).filter(|rank| *rank != self.rank);
        let leaving = others().map(|rank| device.address(&share_of(rank)?)).collect::<Result<Vec<u64>>>()?;
        comm.group(|nccl, comm| {
            for (rank, from) in others().zip(leaving) {
                self.swap(nccl, comm, rank, from, arriving + (rank * n_bytes) as u64, n_bytes)?;
            }
            Ok(())
        })?;
        let dtype = out.dtype();
        let key = ProgramKey {
            family: "reduce_ranks",
            op: op.name(),
            dtypes: [Some(dtype), None, None],
            variant: self.n_ranks as u32,
        };
        let function = device.function(&key, || source(dtype, op, self.n_ranks))?;
        let (own, n) = (share_of(self.rank)?, out.n_elements());
        let args = Args::new().table(&[&own, &scratch, out], 3, &[]).size(n).i32(self.rank as i32);
        device.launch_on(&self.stream, function, Grid::over(n), &args)
    }

    /// Memory for what arrives, which exchanges use one after the other.
    fn scratch(&self, device: &CudaDevice, n_bytes: usize) -> Result<Tensor> {
        let mut scratch = self.scratch.lock();
        let is_capturing = device.is_capturing();
        let found = match scratch.take().filter(|scratch| scratch.n_bytes() >= n_bytes) {
            Some(found) => found,
            None => {
                let shape = Shape::new(&[n_bytes.max(MOST_BYTES)])?;
                let make = || device.allocate_tensor(DType::U8, shape, &tag());
                if is_capturing { keep(make)? } else { make()? }
            }
        };
        *scratch = Some(found.clone());
        // Replays use the same memory.
        if is_capturing { keep(|| Ok(found)) } else { Ok(found) }
    }

    /// Sends a span to a rank and gets one from it.
    fn swap(&self, nccl: &Nccl, comm: Comm, rank: usize, from: u64, to: u64, n_bytes: usize) -> Result<(), Status> {
        let (peer, stream) = (rank as i32, self.stream.cu_stream());
        // SAFETY: see `all_reduce`.
        good(unsafe { (nccl.send)(from as *const c_void, n_bytes, BYTES, peer, comm, stream) })?;
        // SAFETY: as above.
        good(unsafe { (nccl.recv)(to as *mut c_void, n_bytes, BYTES, peer, comm, stream) })
    }

    /// Gathers spans of all ranks.
    fn gather(&self, comm: &Communicator, from: u64, to: u64, n_bytes: usize) -> Result<()> {
        let (from, to, stream) = (from as *const c_void, to as *mut c_void, self.stream.cu_stream());
        // SAFETY: see `all_reduce`.
        comm.group(|nccl, comm| good(unsafe { (nccl.all_gather)(from, to, n_bytes, BYTES, comm, stream) }))
    }

    /// The shape of a rank's share of the rows of a tensor.
    fn shape_of_share(&self, tensor: &Tensor) -> Result<Shape> {
        let mut dims = tensor.shape().dims().to_vec();
        match dims.first_mut() {
            Some(rows) if rows.is_multiple_of(self.n_ranks) => *rows /= self.n_ranks,
            _ => {
                return Err(Error::invalid_argument(format!(
                    "{}{} is cut along its first axis, which {} ranks do not divide",
                    tensor.dtype(),
                    tensor.shape(),
                    self.n_ranks
                )));
            }
        }
        Shape::new(&dims)
    }
}

impl Drop for NcclRanks {
    fn drop(&mut self) {
        // What is under way reads and writes memory that is about to be used for something else. It ends soon unless a rank is gone.
        // An error means that the GPU is lost.
        if let Ok(last) = self.streams.mark(&self.stream, None) {
            let deadline = Instant::now() + LAST_EXCHANGE;
            while !last.is_done() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_micros(200));
            }
            if !last.is_done() {
                self.abort(Error::cancelled("the device is closed"));
            }
            let _ = last.wait();
        }
    }
}

/// A GPU, as no other one in the world is called.
pub(in crate::cuda) fn hardware_of(gpu: &str) -> String {
    // NCCL takes ranks with the same identifier to be on one host; so do we.
    let host = match std::env::var("NCCL_HOSTID") {
        Ok(host) => host,
        Err(_) => fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned(),
    };
    format!("{gpu} of host {host}")
}

fn good(status: Status) -> Result<(), Status> {
    match status {
        // The end of the group waits for what is in progress.
        SUCCESS | IN_PROGRESS => Ok(()),
        other => Err(other),
    }
}

fn tag() -> Arc<str> {
    "an exchange between ranks".into()
}

/// Where tensors are, and how many bytes they have, but for empty ones.
fn places(device: &CudaDevice, tensors: &[Tensor]) -> Result<Vec<(u64, usize)>> {
    let of = |tensor: &Tensor| Ok((device.address(tensor)?, tensor.n_bytes()));
    tensors.iter().filter(|tensor| tensor.n_bytes() > 0).map(of).collect()
}

/// The kernel that combines the shares of so many ranks.
fn source(dtype: DType, op: ReduceOp, n_ranks: usize) -> String {
    let levels = usize::BITS - n_ranks.leading_zeros();
    let combine = match op {
        ReduceOp::Sum | ReduceOp::Mean => "(a) + (b)",
        ReduceOp::Prod => "(a) * (b)",
        ReduceOp::Min => "smaller<W>(a, b)",
        ReduceOp::Max => "larger<W>(a, b)",
    };
    let finish = match op {
        // As on CPUs: a number of ranks that an integer type cannot hold divides to zero.
        ReduceOp::Mean if dtype == DType::I8 && n_ranks > 127 => "(W)0".to_owned(),
        ReduceOp::Mean if dtype == DType::U8 && n_ranks > 255 => "(W)0".to_owned(),
        ReduceOp::Mean => format!("(W)((x) / (W){n_ranks})"),
        _ => "(x)".to_owned(),
    };
    let unrolled = if n_ranks <= MOST_UNROLLED { n_ranks } else { 1 };
    format!(
        "#define T {}\n#define N_RANKS {n_ranks}\n#define LEVELS {levels}\n#define UNROLLED {unrolled}\n#define COMBINE(a, b) \
         (W)({combine})\n#define FINISH(x) {finish}\n{SOURCE}",
        c_type(dtype)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::program::compile_only;

    #[test]
    fn a_call_that_is_in_progress_has_not_failed() {
        assert_eq!([SUCCESS, IN_PROGRESS].map(good), [Ok(()); 2]);
        assert_eq!(good(1), Err(1));
    }

    #[test]
    fn the_sums_of_any_number_of_ranks_compile() {
        let mut n = 0;
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I8, DType::U16, DType::I64] {
            for (op, n_ranks) in [(ReduceOp::Mean, 2), (ReduceOp::Sum, 7), (ReduceOp::Max, 8), (ReduceOp::Prod, 300)] {
                let key = ProgramKey {
                    family: "reduce_ranks",
                    op: op.name(),
                    dtypes: [Some(dtype), None, None],
                    variant: n_ranks as u32,
                };
                match compile_only(&key, &source(dtype, op, n_ranks), "sm_90") {
                    None => return println!("skipped: no NVRTC here"),
                    Some(Ok(_)) => n += 1,
                    Some(Err(error)) => panic!("{key:?}: {error}"),
                }
            }
        }
        println!("{n} sources compile");
    }
}
