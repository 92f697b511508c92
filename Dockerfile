# The `kolo` command in an image without a shell or a package manager, as a user without rights.
#
#   docker build -t kolo .
#
# GPUs: the driver's libraries come from the NVIDIA container toolkit; NVRTC, cuBLASLt, cuDNN and NCCL are opened at run time, so
# use a CUDA runtime image as the last stage where they are needed (--build-arg RUNTIME=nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04).
ARG RUNTIME=gcr.io/distroless/cc-debian12:nonroot

FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin kolo

FROM ${RUNTIME}
COPY --from=build /src/target/release/kolo /usr/local/bin/kolo
USER 65532:65532
# Where checkpoints go, if a volume is mounted there.
WORKDIR /data
ENV HOME=/tmp
ENTRYPOINT ["/usr/local/bin/kolo"]
