package nriplugin

import (
	"math"
	"math/rand/v2"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Die ends the connection like the death of the plugin. It may be called in a
// hook.
func (p *Plugin) Die() { p.conn.Close() }

// Send writes raw bytes to the runtime, outside of the protocol.
func (p *Plugin) Send(bytes []byte) error {
	_, err := p.conn.Write(bytes)
	return err
}

// Values set by Everything.
const (
	MemoryLimit = 128 << 20 // bytes
	CPUShares   = 512
	OpenFiles   = 345
)

// Everything is an adjustment of everything in the protocol that containers of
// tests accept on every node, with every runtime.
func Everything() *api.ContainerAdjustment {
	a := &api.ContainerAdjustment{}
	a.AddAnnotation("from-plugin", "yes")
	a.AddEnv("FROM_PLUGIN", "yes")
	a.RemoveEnv("PLUGIN_REMOVES")
	a.AddMount(&api.Mount{Source: "/etc/hostname", Destination: "/from-plugin/name", Type: "bind", Options: []string{"bind", "ro"}})
	a.RemoveMount("/dev/mqueue")
	a.AddRlimit("RLIMIT_NOFILE", OpenFiles, OpenFiles)
	// Debian's crun sometimes fails with hooks of any other stage.
	a.AddHooks(&api.Hooks{Poststop: []*api.Hook{{Path: "/bin/true", Args: []string{"true"}, Timeout: api.Int(60)}}})
	a.AddDevice(&api.LinuxDevice{Path: "/dev/from-plugin", Type: "c", Major: 1, Minor: 3})
	a.SetLinuxMemoryLimit(MemoryLimit)
	a.SetLinuxMemoryReservation(MemoryLimit / 2)
	a.SetLinuxCPUShares(CPUShares)
	a.SetLinuxCPUPeriod(100_000)
	a.SetLinuxCPUQuota(200_000)
	a.SetLinuxPidLimits(1000)
	a.SetLinuxOomScoreAdj(new(321))
	a.SetLinuxSysctl("net.ipv4.ip_unprivileged_port_start", "17")
	a.SetLinuxSeccompPolicy(&api.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW", Syscalls: []*api.LinuxSyscall{
		{Names: []string{"acct"}, Action: "SCMP_ACT_ERRNO", ErrnoRet: api.UInt32(uint32(77))},
	}})
	a.SetLinuxIOPriority(&api.LinuxIOPriority{Class: api.IOPrioClass_IOPRIO_CLASS_BE, Priority: 7})
	a.SetLinuxScheduler(&api.LinuxScheduler{Policy: api.LinuxSchedulerPolicy_SCHED_BATCH, Nice: 1})
	return a
}

// Nonsense sets all fields of a message, and of nested ones, to meaningless
// values, or leaves some of them out.
func Nonsense(random *rand.Rand, m proto.Message) { fill(random, m.ProtoReflect()) }

func fill(random *rand.Rand, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		switch {
		case random.IntN(4) == 0:
		case field.IsMap():
			entries := m.Mutable(field).Map()
			key := value(random, field.MapKey(), nil).MapKey()
			entries.Set(key, value(random, field.MapValue(), entries.NewValue))
		case field.IsList():
			list := m.Mutable(field).List()
			for range 1 + random.IntN(3) {
				list.Append(value(random, field, list.NewElement))
			}
		default:
			m.Set(field, value(random, field, func() protoreflect.Value { return m.NewField(field) }))
		}
	}
}

// value returns one value of a field; empty makes a message.
func value(random *rand.Rand, field protoreflect.FieldDescriptor, empty func() protoreflect.Value) protoreflect.Value {
	switch field.Kind() {
	case protoreflect.MessageKind:
		v := empty()
		fill(random, v.Message())
		return v
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(pick(random, "", "-", "-x", "/", "..", "../../etc", "a=b", "=", "\n\x00", "é", api.MarkForRemoval(""), api.MarkForRemoval("x"), "net.x"))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte{0, 255})
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(random.IntN(2) == 0)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(pick[protoreflect.EnumNumber](random, -1, 0, 1, 2, 99))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(pick[int32](random, math.MinInt32, -1, 0, 1, math.MaxInt32))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(pick[int64](random, math.MinInt64, -1, 0, 1, math.MaxInt64))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(pick[uint32](random, 0, 1, math.MaxUint32))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(pick[uint64](random, 0, 1, math.MaxUint64))
	default:
		panic("the protocol has a new kind of field: " + field.Kind().String())
	}
}

func pick[T any](random *rand.Rand, from ...T) T { return from[random.IntN(len(from))] }
