// CUDA tensors and the CPU tensors that share their memory.
#pragma once
#include <ATen/ops/as_strided_native.h>

#include "memory.h"

namespace pretended {
c10::DispatchKeySet cuda_keys() {
  using Key = c10::DispatchKey;
  return c10::DispatchKeySet({Key::CUDA, Key::AutogradCUDA, Key::ADInplaceOrView});
}
Tensor with_shape_of(Tensor result, const Tensor& like) {
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return result;
}
void nothing(void*) {}
Tensor on_cpu(const Tensor& tensor) {  // does not own the memory
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), nullptr, &nothing, c10::Device(c10::kCPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto result = with_shape_of(at::detail::make_tensor<c10::TensorImpl>(std::move(same), keys, tensor.dtype()), tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}
void drop(void* owner) {
  auto* kept = static_cast<Tensor*>(owner);
  order.free(kept->storage().data());
  delete kept;
}
c10::DataPtr owned_by(const Tensor& tensor, c10::DeviceIndex index) {
  return {tensor.storage().mutable_data(), new Tensor(tensor), &drop, c10::Device(CUDA, index)};
}
Tensor on_cuda(const Tensor& tensor, c10::DeviceIndex index, const std::string& name, int64_t time) {
  order.allocate(tensor.storage().data(), current_stream);
  use(tensor, true, name, time);
  c10::Storage same(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), owned_by(tensor, index), &memory, true);
  return with_shape_of(at::detail::make_tensor<c10::TensorImpl>(std::move(same), cuda_keys(), tensor.dtype()), tensor);
}

// The arguments of one call that were CUDA tensors, and the CPU tensors that stand for them.
struct Moved {
  struct Pair { Tensor original, alias; bool writes; };
  std::vector<Pair> pairs;
  bool has_host_tensor = false, has_other_device = false;
  c10::DeviceIndex index = -1;
  int64_t time = 0;

  Tensor to_cpu(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_tensor |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    for (auto& pair : pairs)
      if (pair.original.is_same(tensor)) {
        pair.writes |= writes;
        return pair.alias;
      }
    if (index >= 0 && index != tensor.device().index() && tensor.dim() > 0) has_other_device = true;
    if (index < 0) index = tensor.device().index();
    pairs.push_back({tensor, on_cpu(tensor), writes});
    return pairs.back().alias;
  }
  c10::IValue to_cpu(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return to_cpu(value.toTensor(), writes);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor tensor : value.toTensorList()) list.push_back(to_cpu(tensor, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(to_cpu(*tensor, writes)) : tensor);
      return list;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
      c10::List<c10::List<Tensor>> lists;
      for (c10::IValue inner : value.toList()) lists.push_back(to_cpu(inner, writes).toTensorList());
      return lists;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (index < 0) index = value.toDevice().index();
      return c10::Device(c10::kCPU);
    }
    return value;
  }
  void note_uses(const std::string& name) {
    for (const auto& pair : pairs) use(pair.original, pair.writes, name, time);
  }
  // What an operator did to a CPU tensor's shape or memory (resize_, out=) is done to the CUDA tensor.
  void write_back() {
    for (auto& [original, alias, writes] : pairs) {
      if (!writes || !original.has_storage()) continue;
      if (alias.storage().data() != original.storage().data()) {
        order.allocate(alias.storage().data(), current_stream);
        auto storage = original.storage();
        storage.set_data_ptr_noswap(owned_by(alias, original.device().index()));
        storage.set_nbytes(alias.storage().nbytes());
      }
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides()) with_shape_of(original, alias);
    }
  }
  Tensor back(const Tensor& tensor, const std::string& name) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& pair : pairs)
      if (pair.alias.is_same(tensor)) return pair.original;
    const auto* data = tensor.storage().data();
    for (const auto& pair : pairs)
      if (data && data == pair.original.storage().data())
        return at::native::as_strided_tensorimpl(
            pair.original, tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return on_cuda(tensor, index < 0 ? current_device : index, name, time);
  }
  c10::IValue back(const c10::IValue& value, const std::string& name) {
    if (value.isTensor()) return back(value.toTensor(), name);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (Tensor tensor : value.toTensorList()) list.push_back(back(tensor, name));
      return list;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
      c10::List<c10::List<Tensor>> lists;
      for (c10::IValue inner : value.toList()) lists.push_back(back(inner, name).toTensorList());
      return lists;
    }
    return value;
  }
};
}  // namespace pretended
