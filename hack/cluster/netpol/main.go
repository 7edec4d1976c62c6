// Command netpol enforces NetworkPolicies on one node of a test cluster: kube-router's own controller, which writes
// iptables rules and ipsets into the network namespace that it runs in, without kube-router's router and proxy. go.mod
// takes the fork that k3s publishes and runs in the same way. kube-network-policies needs the nftables expression queue
// (CONFIG_NFT_QUEUE), which not every kernel has.
package main

import (
	"flag"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	node := flag.String("node", "", "name of the node that this runs on")
	services := flag.String("services", "", "range of the Services' addresses")
	klog.InitFlags(nil)
	flag.Parse()
	if err := run(*kubeconfig, *node, *services); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, node, services string) error {
	rest, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	factory := informers.NewSharedInformerFactory(client, 0)
	pods, namespaces := factory.Core().V1().Pods().Informer(), factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(stop)
	factory.WaitForCacheSync(stop)

	config := options.NewKubeRouterConfig()
	config.EnableIPv4, config.HostnameOverride, config.ClusterIPCIDRs = true, node, []string{services}
	config.IPTablesSyncPeriod = 30 * time.Second
	tables, sets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return err
	}
	var setLock sync.Mutex
	controller, err := netpol.NewNetworkPolicyController(
		client, config, pods, policies, namespaces, &setLock, nil, tables, sets)
	if err != nil {
		return err
	}
	handlers := map[cache.SharedIndexInformer]cache.ResourceEventHandler{
		pods:       controller.PodEventHandler,
		namespaces: controller.NamespaceEventHandler,
		policies:   controller.NetworkPolicyEventHandler,
	}
	for informer, handler := range handlers {
		if _, err := informer.AddEventHandler(handler); err != nil {
			return err
		}
	}
	beats := make(chan *healthcheck.ControllerHeartbeat, 10)
	go func() {
		for range beats {
		}
	}()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	var running sync.WaitGroup
	running.Add(1)
	go controller.Run(beats, stop, &running)
	<-signals
	close(stop)
	running.Wait()
	return nil
}
