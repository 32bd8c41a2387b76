/* The C ABI of a device's runtime, beside the ops of abi.h: devices, memory, streams, events, and what processes share.
 *
 * A library that queues its ops on a device exports these functions (runtime_entry_points.hpp defines them over a
 * vendor's Driver). Each returns 0 or a KV_FAIL_ code, and kvcore_last_error() then tells why; those without a result
 * do nothing for null. Any host thread may call any of them.
 *
 * - A stream (void *) is what the ops take. It belongs to one device, and has the two status words of its ops.
 * - An event (void *) is recorded once, when it is made.
 */
#ifndef KVCORE_RUNTIME_H
#define KVCORE_RUNTIME_H

#include "abi.h"

#define KV_RUNTIME_VERSION 1
#define KV_IPC_BYTES 64

typedef struct kv_device_info {
    char name[128];
    char arch[64];         /* as compilers name it: "sm_90", "gfx942" */
    int64_t memory_bytes;
    int32_t units;         /* multiprocessors, compute units */
    int32_t warp_width;
    int32_t driver_version; /* as the vendor numbers it */
    int32_t reserved;
} kv_device_info;

/* What is measured and not known beforehand. */
typedef struct kv_tuning {
    int64_t engine_bytes;    /* buffers in the device's memory of so many bytes and more go through the copy engine,
                                smaller ones through a kernel */
    int32_t blocks_per_unit; /* blocks of a kernel that fill a unit */
    int32_t reserved;
} kv_tuning;

/* Memory of another process: the handle of the allocation that it lies in, and where in it. */
typedef struct kv_ipc_memory {
    unsigned char handle[KV_IPC_BYTES];
    int64_t offset, allocation_bytes;
} kv_ipc_memory;

/*
 * int32_t kvcore_runtime_version(void);
 * const char *kvcore_kernel_list(void);      lines "name<TAB>type": the kernels that the ops launch
 *
 * int32_t kvcore_driver_open(const char *path);     the vendor's driver library; later calls change nothing
 * int32_t kvcore_device_count(int32_t *count);
 * int32_t kvcore_device_info(int32_t ordinal, kv_device_info *info);
 * int32_t kvcore_device_load(int32_t ordinal, const void *image, int64_t bytes, const kv_tuning *tuning);
 *                                            the kernels of a device; before it, ops fail
 * int32_t kvcore_device_use(int32_t ordinal);       where kvcore_tables_create of this thread puts tables
 *
 * int32_t kvcore_memory_allocate(int32_t ordinal, int64_t bytes, uint64_t *address);    aligned to 256 bytes
 * int32_t kvcore_memory_free(int32_t ordinal, uint64_t address);     what uses it must be done
 * int32_t kvcore_memory_place(uint64_t address, int32_t *ordinal);   -1: memory of the host
 * int32_t kvcore_host_register(uint64_t address, int64_t bytes);     pins memory of the host
 * int32_t kvcore_host_unregister(uint64_t address);
 *
 * int32_t kvcore_stream_create(int32_t ordinal, uint64_t native, int32_t adopt, void **stream);
 *                                            adopt: `native` is the vendor's stream, which stays its owner's
 * uint64_t *kvcore_stream_status(void *stream);     the address of its status words, in memory of the device
 * uint64_t kvcore_stream_native(void *stream);      the vendor's handle of it
 * int32_t kvcore_stream_synchronize(void *stream);
 * int32_t kvcore_stream_check(void *stream, uint64_t *status);   waits; gives the first word, sets both to KV_OK
 * int32_t kvcore_stream_destroy(void *stream);      waits
 *
 * int32_t kvcore_event_record(void *stream, int32_t shared, void **event);   shared: other processes may import it
 * int32_t kvcore_event_passed(void *event, int32_t *passed);
 * int32_t kvcore_event_synchronize(void *event);
 * int32_t kvcore_event_wait(void *stream, void *event);   what is queued later on the stream waits for the event
 * int32_t kvcore_event_destroy(void *event);
 *
 * int32_t kvcore_ipc_export_memory(uint64_t address, kv_ipc_memory *handle);
 * int32_t kvcore_ipc_import_memory(int32_t ordinal, const kv_ipc_memory *handle, uint64_t *address);
 * int32_t kvcore_ipc_close_memory(int32_t ordinal, uint64_t address);      what import_memory gave, less the offset
 * int32_t kvcore_ipc_export_event(void *event, unsigned char *handle);        KV_IPC_BYTES
 * int32_t kvcore_ipc_import_event(int32_t ordinal, const unsigned char *handle, void **event);
 */

#endif
