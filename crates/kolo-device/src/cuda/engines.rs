//! A pass of a convolution as a graph of one operation for cuDNN's [`backend`](super::backend).

use cudarc::cudnn::sys;
use kolo_core::Result;

use super::backend::{self, Descriptor, Graph, Kind, Name, TensorStorage, Thing, data_type};
use super::conv::{Conv, ConvPass};

/// A tensor of `[outer, channels, height, width]`, channels last in memory unless `channels_first`.
fn tensor(call: &Conv, id: i64, sizes: [usize; 4]) -> Result<Descriptor> {
    let [n, c, h, w] = sizes.map(|size| size as i64);
    let strides = if call.channels_first { [c * h * w, h * w, w, 1] } else { [c * h * w, 1, w * c, c] };
    let [data, _] = data_type(call.dtype)?;
    backend::tensor(id, data, TensorStorage::Memory, [n, c, h, w], strides)
}

/// The ids of the tensors in a graph: image, filter, output, whichever of them the pass computes.
pub(super) const IDS: [i64; 3] = [1, 2, 3];

/// The graph of a pass, with the heuristic's engines. The handle is alive and used by no other thread.
pub(super) fn graph(handle: sys::cudnnHandle_t, call: &Conv, pass: ConvPass) -> Result<Graph> {
    let [_, compute] = data_type(call.dtype)?;
    let [h, w, c] = call.input;
    let [out_h, out_w, k] = call.output;
    let per_group = c.checked_div(call.groups).unwrap_or(0);
    let image = tensor(call, IDS[0], [call.batch, c, h, w])?;
    let filter = tensor(call, IDS[1], [k, per_group, call.filter[0], call.filter[1]])?;
    let output = tensor(call, IDS[2], [call.batch, k, out_h, out_w])?;

    let conv = Descriptor::new(Thing::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?;
    let pair = |sizes: [usize; 2]| sizes.map(|size| size as i64);
    let mode = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[compute])?;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, Kind::CUDNN_TYPE_CONVOLUTION_MODE, &[mode])?;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, Kind::CUDNN_TYPE_INT64, &[2i64])?;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, Kind::CUDNN_TYPE_INT64, &pair(call.pad))?;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, Kind::CUDNN_TYPE_INT64, &pair(call.pad))?;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, Kind::CUDNN_TYPE_INT64, &pair(call.dilation))?;
    conv.set(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, Kind::CUDNN_TYPE_INT64, &pair(call.stride))?;
    let conv = conv.finish()?;

    // Image, filter, output, the convolution, and the two factors, by their names in this pass.
    let (thing, names) = match pass {
        ConvPass::Forward => (
            Thing::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            ],
        ),
        ConvPass::BackpropInput => (
            Thing::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            ],
        ),
        ConvPass::BackpropFilter => (
            Thing::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            [
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            ],
        ),
    };
    let operation = Descriptor::new(thing)?;
    for (name, part) in names.into_iter().zip([&image, &filter, &output, &conv]) {
        operation.set_descriptor(name, part)?;
    }
    operation.set(names[4], Kind::CUDNN_TYPE_FLOAT, &[1f32])?;
    operation.set(names[5], Kind::CUDNN_TYPE_FLOAT, &[0f32])?;
    let operation = operation.finish()?;
    Graph::new(handle, vec![operation], vec![image, filter, output, conv])
}
