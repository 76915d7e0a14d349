// A CUDA device of host memory: tensors say `cuda`, and the kernels that run are the CPU's on the same memory.
//
// It is a device guard, hooks, allocators and a boxed fallback for the dispatch key CUDA. It tells Python of
// every host synchronisation, of tensors of different devices in one operator, and of stream races, and it counts
// kernels. Collectives on CUDA tensors run over gloo; as with NCCL they have a stream of their own.
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <utility>

#include "tensors.h"

namespace pretended {
const std::set<std::string> WAITING = {  // their results have a size that the host must know, or are on the host
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::_linalg_check_errors"};
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
const std::string PREPARED = "aten::index";  // PyTorch takes a mask's `nonzero` and moves indices before the kernel

// Of index_put: a number on the host is filled in under a mask, without a `nonzero`.
bool is_host_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() && value.toTensor().numel() == 1;
}
bool has_mask(const c10::IValue& value) {
  if (!value.isOptionalTensorList()) return false;
  for (std::optional<Tensor> tensor : value.toOptionalTensorList())
    if (tensor && tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte))
      return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Inside inside;
  const auto& schema = op.schema();
  const auto& overload = schema.overload_name();
  const std::string& name = schema.name();
  const std::string full = overload.empty() ? name : name + "." + overload;
  const auto first = stack->size() - schema.arguments().size();
  Moved moved;
  const bool indexes = INDEXING.count(name);
  const bool fills = indexes && name != PREPARED && is_host_number((*stack)[first + 2]);
  bool masks = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    masks |= has_mask(value);
    value = moved.to_cpu(value, alias && alias->isWrite());
  }
  if (moved.has_other_device || (moved.has_host_tensor && !moved.pairs.empty() && !indexes)) {
    say("mixed", full, moved.has_other_device ? "cuda tensors of two devices" : "cuda and cpu tensors");
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices in ", full);
  }
  count(full);
  moved.time = order.launch(current_stream);
  moved.note_uses(full);
  const bool repeats = name == "aten::repeat_interleave" && overload == "Tensor" && stack->back().isNone();
  if (WAITING.count(name) || repeats) host_waits(full);
  if (indexes && name != PREPARED && masks && !fills) host_waits(full, "a mask");
  if (indexes && name != PREPARED && moved.has_host_tensor) host_waits(full, "an index on the host");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  moved.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = moved.back((*stack)[i], full);
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const auto before = current_device;
  if (device && device->has_index()) guard.setDevice(*device);
  const auto type = at::scalarTypeToTypeMeta(dtype.value_or(at::get_default_dtype_as_scalartype()));
  const auto bytes = c10::multiply_integers(size) * type.itemsize();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory.allocate(bytes), &memory, true);
  current_device = before;
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), cuda_keys(), type);
  result.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve)
    result.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return result;
}
Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  int64_t extent = 1;
  for (size_t i = 0; i < size.size(); i++) extent = size[i] && extent ? extent + (size[i] - 1) * stride[i] : 0;
  auto flat = empty({extent}, dtype, layout, device, pin, std::nullopt);
  flat.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return flat;
}
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel() || !source.numel()) return self;
  Inside inside;
  const bool from = source.is_cuda(), to = self.is_cuda();
  const auto* name = from && to ? "copy_ on the device" : from ? "copy_ to the host" : "copy_ to the device";
  count(name);
  const auto time = order.launch(current_stream);
  if (from) use(source, false, name, time);
  if (to) use(self, true, name, time);
  const bool pins = is_pinned((from ? self : source).storage().data());
  if (from != to && !non_blocking) host_waits(name, bytes_of(source));
  else if (from && !to && !pins) host_waits(name, bytes_of(source) + ", memory not pinned");
  else if (to && !from && !pins) say("pageable", name, bytes_of(source));
  (to ? on_cpu(self) : self).copy_(from ? on_cpu(source) : source);
  return self;
}
Tensor& set_storage(
    Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const int64_t numel = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_tensor(self, empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt));
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto data = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
void record_stream(Tensor& self, c10::Stream stream) { order.record_stream(self.storage().data(), stream.id()); }

// PyTorch's grouped product has one kernel, for bf16 on compute capability 9.0 and 10.0; it wants aligned memory.
Tensor grouped_mm(
    const Tensor& left, const Tensor& right, const std::optional<Tensor>& ends, const std::optional<Tensor>& bias,
    std::optional<at::ScalarType> dtype) {
  const std::string name = "aten::_grouped_mm";
  Inside inside;
  Moved moved;
  for (const auto* each : {&left, &right}) {
    TORCH_CHECK(uint64_t(each->data_ptr()) % 16 == 0, "expected data_ptr to be aligned to 16 bytes");
    moved.to_cpu(*each, false);
  }
  if (ends) moved.to_cpu(*ends, false);
  TORCH_CHECK(!moved.has_host_tensor, "_grouped_mm: a CPU tensor");
  count(name);
  moved.time = order.launch(current_stream);
  moved.note_uses(name);
  if (left.scalar_type() != at::kBFloat16 || right.scalar_type() != at::kBFloat16)
    host_waits(name, "not bf16: a loop over the groups, whose ends the host reads");
  std::optional<Tensor> host_ends;
  if (ends) host_ends = on_cpu(*ends);
  auto result = at::_grouped_mm(on_cpu(left), on_cpu(right), host_ends, bias, dtype);
  return on_cuda(result, left.device().index(), name, moved.time);
}

// ---- collectives

// As NCCL's: `wait` lets the current stream wait for the group's, and the host for nothing but a barrier.
struct Collective final : c10d::Work {
  Collective(Clock clock, std::vector<Moved::Pair> pairs, bool blocks)
      : clock_(std::move(clock)), pairs_(std::move(pairs)), blocks_(blocks) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override { order.wait_for_clock(current_stream, clock_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    pairs_.clear();
    if (blocks_) host_waits("barrier");
    return true;
  }
  Clock clock_;
  std::vector<Moved::Pair> pairs_;  // kept until the wait, as NCCL's are
  bool blocks_;
};

// A send or receive of NCCL's. The other rank's part may come later, so that only `wait` waits for gloo's.
struct PeerToPeer final : c10d::Work {
  PeerToPeer(c10::intrusive_ptr<c10d::Work> work, Clock clock, std::vector<Moved::Pair> pairs)
      : work_(std::move(work)), clock_(std::move(clock)), pairs_(std::move(pairs)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  void synchronize() override { order.wait_for_clock(current_stream, clock_); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool came = work_->wait(timeout);
    synchronize();
    pairs_.clear();
    return came;
  }
  c10::intrusive_ptr<c10d::Work> work_;
  Clock clock_;
  std::vector<Moved::Pair> pairs_;
};

Stream stream_of(const c10::IValue& group) {  // of a process group: a negative number
  static std::mutex lock;
  static std::map<void*, Stream> known;
  std::lock_guard<std::mutex> held(lock);
  auto* address = group.toObject()->getSlot(0).toCapsule().get();
  return known.try_emplace(address, -1 - (Stream)known.size()).first->second;
}

void collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Inside inside;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const auto first = stack->size() - schema.arguments().size();
  Moved moved;
  Stream group = -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[first + i];
    const bool reads = schema.arguments()[i].name().rfind("input", 0) == 0 || name == "c10d::send";
    if (value.isObject() && value.type()->repr_str().find("ProcessGroup") != std::string::npos) group = stream_of(value);
    value = moved.to_cpu(value, !reads);
  }
  if (moved.has_host_tensor) say("mixed", name, "a CPU tensor for NCCL");
  std::string sizes;
  for (const auto& pair : moved.pairs) {
    if (!pair.original.is_non_overlapping_and_dense()) say("mixed", name, "a tensor that is not dense");
    sizes += c10::toString(pair.original.scalar_type()) + std::string("[") + std::to_string(pair.original.numel()) + "] ";
  }
  count(name);
  say("collective", name, sizes);
  order.launch(current_stream);
  order.wait_for_clock(group, order.clock_of(current_stream));
  const auto own = current_stream;
  current_stream = group;
  moved.time = order.launch(group);
  moved.note_uses(name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  moved.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isObject()) {
      auto work = value.toCustomClass<c10d::Work>();
      if (work && (name == "c10d::send" || name.rfind("c10d::recv", 0) == 0)) {
        c10::intrusive_ptr<c10d::Work> later =
            c10::make_intrusive<PeerToPeer>(work, order.clock_of(group), moved.pairs);
        value = c10::IValue(later);
        continue;
      }
      if (work) work->wait();
      c10::intrusive_ptr<c10d::Work> done =
          c10::make_intrusive<Collective>(order.clock_of(group), moved.pairs, name == "c10d::barrier");
      value = c10::IValue(done);
    } else {
      value = moved.back(value, name);
    }
  }
  current_stream = own;
}
}  // namespace pretended

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using namespace pretended;
  m.impl("empty.memory_format", &pretended::empty);
  m.impl("empty_strided", &pretended::empty_strided);
  m.impl("copy_", &pretended::copy_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("as_strided", [](const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  m.impl("resize_", &pretended::resize_);
  m.impl("record_stream", &pretended::record_stream);
  m.impl("_grouped_mm", &pretended::grouped_mm);
  // On CUDA one kernel for many tensors; without these, PyTorch's own loop over them would run.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.name.rfind("aten::_foreach_", 0) == 0)
      m.impl(
          (op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name)).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&pretended::fallback>());
}
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const auto* name :
       {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_",
        "alltoall_", "alltoall_base_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&pretended::collective>());
}
namespace at {
using pretended::CUDAHooks;  // PyTorch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" {
void pretended_start(int devices, int own, pretended::Tell tell) {
  c10::SetAllocator(pretended::CUDA, &pretended::memory);
  at::setHostAllocator(pretended::CUDA, &pretended::pinned_memory);
  pretended::num_devices = devices;
  pretended::current_device = own;
  pretended::tell = tell;
}
// Writes "name<tab>count" lines, as many as fit, and begins to count anew; returns the length of all.
int pretended_kernels(char* out, int size) {
  std::lock_guard<std::mutex> held(pretended::counts_lock);
  std::string text;
  for (const auto& [name, count] : pretended::kernel_counts) text += name + "\t" + std::to_string(count) + "\n";
  pretended::kernel_counts.clear();
  const auto length = std::min<int>(text.size(), size - 1);
  std::memcpy(out, text.data(), length);
  out[length] = 0;
  return text.size();
}
// Nanoseconds of the processor in kernels and collectives since the last call.
int64_t pretended_inside_ns() { return pretended::inside_ns.exchange(0); }
// From now on, memory begins as zeros: what kernels that do nothing leave there.
void pretended_zeroed() { pretended::zeroed = true; }
void pretended_wait_for_all() { pretended::order.host_waits_for_all(); }
int64_t pretended_stream() { return pretended::current_stream; }
int pretended_device() { return pretended::current_device; }
void pretended_set_device(int index) { pretended::current_device = index; }
int64_t pretended_most_device_bytes() {
  std::lock_guard<std::mutex> held(pretended::sizes_lock);
  return std::exchange(pretended::most_device_bytes, pretended::device_bytes);
}
int64_t pretended_most_pinned_bytes() { return pretended::most_pinned_bytes.exchange(pretended::pinned_bytes); }
}
