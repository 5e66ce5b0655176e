package main

import (
	"bytes"
	"math"
	"math/rand/v2"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// generator makes unexpected values for fields, by reflection: a field that a
// later cri-api adds is filled like every other.
//
// It leads no path and no cgroup of a request out of the node, because the
// server runs as root: separate tests check such paths.
type generator struct {
	*rand.Rand
	dir    string   // contains the paths of the host
	cgroup string   // the same for cgroup_parent
	words  []string // texts with a meaning on this node: ids, names, handlers
}

// invalidUTF8 stands for as many bytes of invalid UTF-8, which protobuf does
// not encode; see encode.
const invalidUTF8 = "\U0010FFFD"

// encode returns m in wire format.
func encode(m proto.Message) (raw, error) {
	wire, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	return bytes.ReplaceAll(wire, []byte(invalidUTF8), []byte("\xff\xfe\xc0\x80")), err
}

// fill sets each field of m, at any depth, with this probability.
func (g *generator) fill(m protoreflect.Message, probability float64) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		if g.Float64() < probability {
			g.set(m, fields.Get(i))
		}
	}
}

// slot is a field of a message.
type slot struct {
	in    protoreflect.Message
	field protoreflect.FieldDescriptor
}

// slots returns the fields of m and of all messages in it.
func slots(m protoreflect.Message) []slot {
	var all []slot
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		all = append(all, slot{m, field})
		switch {
		case !m.Has(field) || field.Message() == nil || field.IsMap():
		case field.IsList():
			for j := range m.Get(field).List().Len() {
				all = append(all, slots(m.Get(field).List().Get(j).Message())...)
			}
		default:
			all = append(all, slots(m.Get(field).Message())...)
		}
	}
	return all
}

// mutate changes one field of m, at any depth, to any value.
func (g *generator) mutate(m proto.Message) {
	all := slots(m.ProtoReflect())
	if len(all) == 0 {
		return
	}
	s := all[g.IntN(len(all))]
	if g.IntN(6) == 0 {
		s.in.Clear(s.field)
		return
	}
	g.set(s.in, s.field)
}

// set gives a field a value.
func (g *generator) set(m protoreflect.Message, field protoreflect.FieldDescriptor) {
	switch {
	case field.IsMap():
		entries := m.NewField(field).Map()
		for range g.IntN(3) {
			key := g.scalar(field.MapKey(), field.Name())
			entries.Set(key.MapKey(), g.element(entries.NewValue, field.MapValue(), field.Name()))
		}
		m.Set(field, protoreflect.ValueOfMap(entries))
	case field.IsList():
		items := m.NewField(field).List()
		n := g.length(field)
		if n == overlong { // one value repeated, or it would be hundreds of MiB
			v := m.NewField(field).List().NewElement()
			for range n {
				items.Append(v)
			}
			n = 0
		}
		for range n {
			items.Append(g.element(items.NewElement, field, field.Name()))
		}
		m.Set(field, protoreflect.ValueOfList(items))
	default:
		m.Set(field, g.element(func() protoreflect.Value { return m.NewField(field) }, field, field.Name()))
	}
}

// overlong and huge are one more than the server accepts in a list and in a
// text.
const (
	overlong = 1<<16 + 1
	huge     = 1<<20 + 1
)

func (g *generator) length(field protoreflect.FieldDescriptor) int {
	if field.Message() == nil && g.IntN(200) == 0 {
		return overlong
	}
	return g.IntN(4)
}

var long = strings.Repeat("a", huge)

// element returns a message, empty or filled, or a scalar. name is the name of
// its field.
func (g *generator) element(blank func() protoreflect.Value, field protoreflect.FieldDescriptor, name protoreflect.Name) protoreflect.Value {
	if field.Message() == nil {
		return g.scalar(field, name)
	}
	v := blank()
	g.fill(v.Message(), []float64{0, 0.3, 0.8}[g.IntN(3)])
	return v
}

func (g *generator) scalar(field protoreflect.FieldDescriptor, name protoreflect.Name) protoreflect.Value {
	switch field.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(g.text(name))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(g.text(name)))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(g.IntN(2) == 0)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(g.enum(field.Enum().Values()))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(g.number(math.MaxInt32, math.MinInt32)))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(g.number(math.MaxUint32, math.MaxInt32+1)))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(g.number(math.MaxInt64, math.MinInt64))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(g.number(math.MaxInt64, math.MinInt64)))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(math.NaN())
	}
	panic("CRI has a new kind of field: " + field.Kind().String())
}

// number returns a boundary value.
func (g *generator) number(edges ...int64) int64 {
	return g.pick64(append(edges, 0, 1, -1, 7, 80, 1000, 1001, 65535, 65536, math.MaxInt32))
}

func (g *generator) pick64(all []int64) int64 { return all[g.IntN(len(all))] }

func (g *generator) enum(values protoreflect.EnumValueDescriptors) protoreflect.EnumNumber {
	if n := g.IntN(values.Len() + 2); n < values.Len() {
		return values.Get(n).Number()
	}
	return []protoreflect.EnumNumber{-1, 99, math.MaxInt32}[g.IntN(3)]
}

// hostile are texts that may break a parser.
var hostile = []string{
	"", "a", " ", "\n", "\x00", "a\x00b", invalidUTF8, "é☃", "\u2028", "\x7f", "%s%n", "-", "--help", "=", "a=b", "=a", ",", ":", "@", "../up", "a/b", "a//b",
	".", "..", "/", "0", "-1", "99999999999999999999", "1e3", "true", "null", "[]", `"`, "$(id)", "*",
	"localhost/", "runtime/default", "unconfined", "net.core.somaxconn", "kernel.shmmax", "memory.high", "pids.max", "2MB", "CHOWN", "ALL", "rwm", "/dev/null",
}

// text returns a text that is hostile, huge, or known to the node.
func (g *generator) text(field protoreflect.Name) string {
	if field == "cgroup_parent" {
		return g.cgroup + "/" + strings.ReplaceAll(g.hostile(), "..", "_")
	}
	if isHostPath(field) {
		return g.dir + "/" + g.hostile()
	}
	switch g.IntN(8) {
	case 0:
		if g.IntN(20) == 0 {
			return long
		}
		return long[:[]int{64, 65, 254, 1025, 4096}[g.IntN(5)]]
	case 1, 2:
		if len(g.words) > 0 {
			return g.words[g.IntN(len(g.words))]
		}
	}
	return g.hostile()
}

func (g *generator) hostile() string { return hostile[g.IntN(len(hostile))] }

// isHostPath reports whether a field names something on the node.
func isHostPath(field protoreflect.Name) bool {
	name := string(field)
	return name == "log_directory" || name == "host_path" || name == "location" || strings.HasSuffix(name, "_ref") && name != "image_ref" ||
		strings.HasSuffix(name, "_path") && name != "log_path" && name != "container_path" && name != "image_sub_path"
}

// unfit reports whether no server can do what m requests, whatever the verb: it
// has an invalid enum value, or a NUL byte where the kernel would end a text.
func unfit(m protoreflect.Message) bool {
	found := false
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case isFreeText(field.Name()):
		case field.IsMap():
			v.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				found = strings.Contains(key.String(), "\x00") || unfitValue(field.MapValue(), value)
				return !found
			})
		case field.IsList():
			for i := range v.List().Len() {
				found = found || unfitValue(field, v.List().Get(i))
			}
		default:
			found = unfitValue(field, v)
		}
		return !found
	})
	return found
}

// isFreeText reports whether nothing parses a field: maps that are returned
// unchanged, and ids, which name nothing if they are malformed.
func isFreeText(field protoreflect.Name) bool {
	name := string(field)
	return name == "labels" || name == "annotations" || name == "label_selector" || name == "id" || strings.HasSuffix(name, "_id")
}

func unfitValue(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
	switch field.Kind() {
	case protoreflect.MessageKind:
		return unfit(v.Message())
	case protoreflect.EnumKind:
		return field.Enum().Values().ByNumber(v.Enum()) == nil
	case protoreflect.StringKind:
		return strings.Contains(v.String(), "\x00")
	case protoreflect.BytesKind:
		return bytes.IndexByte(v.Bytes(), 0) >= 0
	}
	return false
}
