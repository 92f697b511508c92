//! Input: readers of files, and the pipeline that batches, shuffles and prefetches samples.
