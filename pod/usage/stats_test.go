package usage

import (
	"reflect"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/cgroup"
	"github.com/crius-run/crius/network"
)

func TestIsPodCgroup(t *testing.T) {
	t.Parallel()
	const uid = "0f0f0f0f-1111-2222-3333-444444444444"
	for cgroup, want := range map[string]bool{
		"/kubepods/burstable/pod" + uid: true,
		"/kubepods/pod" + uid:           true,
		"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod0f0f0f0f_1111_2222_3333_444444444444.slice": true,
		"/kubepods.slice/kubepods-pod0f0f0f0f_1111_2222_3333_444444444444.slice":                                      true,
		"/kubepods/burstable":                false,
		"/kubepods/pod" + uid + "/container": false,
		"/kubepods/pod" + uid[:8]:            false,
		"/":                                  false,
		"/system.slice":                      false,
		"/crius":                             false,
		"/kubepods.slice/kubepods-pod0f0f0f0f.slice": false,
	} {
		cfg := &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Uid: uid}, Linux: &cri.LinuxPodSandboxConfig{CgroupParent: cgroup}}
		if got := isPodCgroup(cgroup, cfg); got != want {
			t.Errorf("%s: %v", cgroup, got)
		}
		cfg.Linux.CgroupParent = "" // then it is the node's own setting
		if isPodCgroup(cgroup, cfg) {
			t.Errorf("%s, not asked for", cgroup)
		}
	}
	if isPodCgroup("/a/pod", &cri.PodSandboxConfig{Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/a/pod"}}) {
		t.Error("a pod without a uid")
	}
}

func TestTotal(t *testing.T) {
	t.Parallel()
	at := time.Now()
	part := func(n uint64) cgroup.Usage {
		return cgroup.Usage{Time: at, CPU: &cgroup.CPU{Total: n}, Tasks: &n}
	}
	gone := cgroup.Usage{Time: at}
	if sum := total([]cgroup.Usage{gone, part(1), gone, part(2), part(4)}); sum.CPU.Total != 7 || *sum.Tasks != 7 || !sum.Time.Equal(at) {
		t.Errorf("sum is %+v", sum)
	}
	for _, parts := range [][]cgroup.Usage{nil, {gone}, {gone, gone}} {
		if sum := total(parts); !sum.Gone() {
			t.Errorf("sum of %d is %+v", len(parts), sum)
		}
	}
}

func TestNetworkStats(t *testing.T) {
	t.Parallel()
	one, eth, two := network.Interface{Name: "net1", RxBytes: 1}, network.Interface{Name: "eth0", RxBytes: 2}, network.Interface{Name: "tun0", RxBytes: 3}
	got := networkStats("eth0", []network.Interface{one, eth, two})
	if want := (&NetworkStats{Default: eth, Others: []network.Interface{one, two}}); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	tap := network.Interface{Name: "tap0_kata", RxBytes: 2}
	got = networkStats("eth0", []network.Interface{one, tap})
	if want := (&NetworkStats{Default: network.Interface{Name: "eth0"}, Others: []network.Interface{one}}); !reflect.DeepEqual(got, want) {
		t.Errorf("without the default one: %+v, want %+v", got, want)
	}
}
